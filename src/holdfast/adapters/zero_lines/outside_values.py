"""Finds in the text of a script what its loops ask of the world outside and train by: a clock, a file of their own, a process id.

    found = find_outside(tree, loops)
    found.reason        why no restart would train the same: "what 'time.time()' (line 7) tells goes into the training (line 9)"
    found.files         the calls that ask how large a file is, whether it is there, what lies in a directory: the run tells which

Only what goes into the training counts: the loss, hyperparameters, a seed, what a scheduler is given, whether a step is made or the loop
ends. What is only printed, logged or saved does not. Statements are followed in their order, functions of the script with what they
are given. Pure, and no proof: what goes through objects of packages is not seen. A function that asks, and is handed on uncalled, counts as what it
returns wherever it is called, and so does what an unknown function makes of it.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from holdfast.adapters.zero_lines.drawing_calls import DrawingCalls
from holdfast.adapters.zero_lines.outside_parts import (
    NONE,
    Source,
    Sources,
    Value,
    add,
    everything,
    functions_in,
    is_part,
    merged,
    part_of,
    path_of,
    plain,
    root,
    stores,
    without_files,
)
from holdfast.adapters.zero_lines.script_text import scope_of
from holdfast.base.handler_errors import pass_on
from holdfast.checkpoint.usage.name_flow import TRY, Function, last_name, stored

# What tells something else in every process, by its whole name.
_TOLD = {
    *(f"time.{name}{ns}" for name in ("time", "perf_counter", "monotonic", "process_time", "thread_time") for ns in ("", "_ns")),
    *(f"time.{name}" for name in ("clock_gettime", "clock_gettime_ns", "ctime", "localtime", "gmtime", "strftime")), "timeit.default_timer",
    *(f"datetime.{kind}.{name}" for kind in ("datetime", "date") for name in ("now", "utcnow", "today")), "pandas.Timestamp.now",
    "os.getpid", "os.getppid", "os.uname", "os.urandom", "os.getloadavg", "os.times", "socket.gethostname", "platform.node", "uuid.uuid1", "uuid.uuid4",
    "threading.get_ident", "threading.get_native_id", "secrets.token_bytes", "secrets.token_hex", "secrets.randbelow", "secrets.randbits",
    "secrets.choice", "secrets.SystemRandom", "random.SystemRandom", "os.getrandom", "input", "sys.stdin.read", "sys.stdin.readline", "sys.stdin.readlines",
}  # fmt: skip
# Numbers that are others in another process; they are asked for as keys too, which is harmless.
_NUMBERS = {"id", "hash"}
# What tells of files, by its whole name, and methods of paths and of files that do.
_OF_FILES = {
    "os.path.getsize", "os.path.getmtime", "os.path.exists", "os.path.lexists", "os.path.isfile", "os.path.isdir", "os.stat", "os.lstat", "os.listdir",
    "os.scandir", "os.walk", "glob.glob", "glob.iglob",
}  # fmt: skip
_FILE_METHODS = {
    "tell", "seek", "exists", "is_file", "is_dir", "stat", "lstat", "iterdir", "glob", "rglob",
}  # fmt: skip
# What sets itself up by the world outside if it is given nothing.
_UNSEEDED = {
    "random.Random",
    *(f"numpy.random.{name}" for name in ("default_rng", "RandomState", "SeedSequence", "PCG64")),
}
# What calls a function, or ends the script, after a time.
_ALARMS = {"signal.alarm", "signal.setitimer", "threading.Timer"}
# Methods by which an object is told something.
_TELLS = {"append", "add", "update", "extend", "set", "clear", "put", "stop", "cancel", "write"}
# Methods that packages call as the loop trains.
_BY_OTHERS = ("forward", "__getitem__", "__iter__", "__next__", "collate", "collate_fn")
_SEEDS = {
    "set_epoch",
    "manual_seed",
    "manual_seed_all",
    "seed",
    "seed_all",
    "seed_everything",
    "set_seed",
    "default_rng",
    "RandomState",
}
# What surely is no module of the script's.
_LIBRARIES = {"torch", "numpy", *sys.stdlib_module_names}
_EXITS = {"sys.exit", "os._exit", "os.abort", "os.kill", "signal.raise_signal"}
_RATES = {"lr", "momentum", "weight_decay", "betas", "eps", "dampening", "alpha", "max_norm"}
_SUMS = {"max", "min", "sum", "any", "all", "sorted"}
_QUIET = {"print", "isinstance", "type", "repr", "hasattr", "callable", "super"}
# What is called before a loop to give something to a name; what other functions return there is not followed.
_PLAIN = {name.rpartition(".")[2] for name in _TOLD} | {
    "int",
    "float",
    "str",
    "round",
    "list",
    "dict",
    "tuple",
    "Namespace",
    "SimpleNamespace",
}
# What makes an object of the names that it is given.
_KEYED = {"dict": "['{}']", "Namespace": ".{}", "SimpleNamespace": ".{}"}
# Statements whose parts run where they stand.
_BLOCKS: tuple[type[ast.stmt], ...] = (ast.If, ast.With, *TRY)
_INNER: tuple[type[ast.AST], ...] = (*_BLOCKS, ast.Match, ast.ExceptHandler, ast.match_case)
# Objects with a `step` that trains nothing.
_TRAINERS = ("opt", "sched", "adam", "sgd")
_NOTHING = {"append", "extend", "insert", "write", "add_scalar", "info", "debug", "warning"}
_NO_TRAINER = ("prof", "bar", "progress", "log", "meter", "timer", "writer", "track")
_MAX_DEPTH, _MAX_CALLS, _MAX_ROUNDS = 16, 3000, 3


@dataclass(frozen=True, slots=True)
class Outside:
    """Something of the world outside that a script trains by.

    Attributes:
        reason: what a restart would find otherwise; empty if there is nothing.
        files: calls that ask something of files, with the line to which that goes, and whether that only ends a loop.
    """

    reason: str = ""
    files: tuple[tuple[ast.Call, int, bool], ...] = ()


def find_outside(tree: ast.Module, loops: Sequence[ast.For], others: Sequence[ast.Module] = ()) -> Outside:
    """Returns what loops train by that a restart would find otherwise.

    Args:
        tree: the text with the loops.
        loops: those that train.
        others: texts of other modules of the script, with functions that it may call.
    """
    try:
        flow = _Flow(tree, loops, others)
        flow.run()
    except Exception as error:  # noqa: BLE001 - a text that nobody foresaw must run all the same
        pass_on(error)
        return Outside(_asked_unseen((tree, *others)))
    mine = {id(node) for node in ast.walk(tree)}
    asked = [row for row in flow.found.items() if row[0].is_file]
    files = tuple((source.node, line, ends) for source, (line, ends) in asked if id(source.node) in mine)
    # Nobody looks at files that other modules ask for; a file that ends a loop is mostly there to stop it.
    told = [
        (source, line)
        for source, (line, ends) in flow.found.items()
        if not (source.is_file and (ends or id(source.node) in mine))
    ]
    if not told:
        return Outside("", files)
    source, line = min(told, key=lambda row: (row[0].line, row[1]))
    return Outside(
        f"what {source.text!r} (line {source.line}) tells goes into the training (line {line}), and a restart is told something else: "
        f"count steps, or take an argument, instead",
        files,
    )


@dataclass(frozen=True, slots=True)
class _Given:
    """The values that a call is given.

    Attributes:
        places: by its place.
        words: by its name; `**` is the name of a dict of such.
    """

    places: Sequence[Value] = ()
    words: Mapping[str, Value] = field(default_factory=dict)

    @property
    def functions(self) -> Sources:
        """Return what functions among it ask."""
        return NONE.union(*(functions_in(value) for value in (*self.places, *self.words.values())))

    @property
    def unnamed(self) -> Sources:
        """Return what is told by that which has no name here."""
        return NONE.union(*(plain(value) for value in (*self.places, self.words.get("**", {}))))


_NOTHING_GIVEN = _Given()


@dataclass(slots=True)
class _Frame:
    """One function, or the script, that is gone through.

    Attributes:
        names: paths that hold something -> where that comes from.
        control: what decides whether the statement runs.
        depth: of calls.
        loops: the loops around the statement, the innermost last.
        rates: names that each parameter group, or parameter, is given to.
        trains: whether a loop that trains calls it.
    """

    scope: ast.AST
    names: dict[str, Sources]
    control: Sources = NONE
    returned: Value = field(default_factory=dict)
    depth: int = 0
    loops: list[ast.AST] = field(default_factory=list)
    rates: set[str] = field(default_factory=set)
    trains: bool = False


class _Flow:
    """Goes through the loops, and through what they call."""

    def __init__(self, tree: ast.Module, loops: Sequence[ast.For], others: Sequence[ast.Module]) -> None:
        self._tree, self._loops = tree, list(loops)
        self._training = {id(loop) for loop in loops}
        self.found: dict[Source, tuple[int, bool]] = {}  # the line, and whether only the end of a loop hangs on it
        self._imports: dict[str, str] = {}
        self._functions: dict[str, list[ast.AST]] = {}
        self._methods: dict[str, list[ast.AST]] = {}
        self._classes: dict[str, ast.ClassDef] = {}
        self._made: dict[str, str] = {}  # a name -> the class of what is given to it
        self._alarms: Sources = NONE
        self._scopes: list[ast.expr] = []  # what is called by an alarm; their `id` is a key
        self._attributes: dict[str, Value] = {}  # the functions that an attribute of this name holds
        self._properties: set[str] = set()
        self._around: dict[int, ast.AST] = {}
        self._locals: dict[int, set[str]] = {}
        self._free: dict[int, dict[str, Sources]] = {}
        self._afar: dict[int, dict[str, Sources]] = {}  # the part of it that other functions set
        self._memo: dict[
            tuple[int, frozenset[tuple[str, Sources]], Sources, bool], tuple[Value, dict[str, Sources]]
        ] = {}
        self._running: set[int] = set()
        self._calls = 0
        self._assigns: list[ast.Assign] = []
        for each in (*others, tree):
            self._read(each.body, each)
        self._made = {
            last_name(node.targets[0]): last_name(node.value.func)
            for each in (*others, tree)
            for node in ast.walk(each)
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)
        }
        self._leads = self._leading()
        self._drawing = DrawingCalls((*others, tree))
        self._aliases()

    def _read(self, statements: Sequence[ast.AST], scope: ast.AST, kind: ast.ClassDef | None = None) -> None:
        for part in statements:
            if isinstance(part, ast.Import):
                for alias in part.names:
                    self._imports[alias.asname or alias.name.split(".")[0]] = (
                        alias.name if alias.asname else alias.name.split(".")[0]
                    )
            elif isinstance(part, ast.ImportFrom):
                home = f"{'.' * part.level}{part.module or ''}"
                names = [(alias.asname or alias.name, f"{home}.{alias.name}") for alias in part.names]
                if part.names[0].name == "*":
                    names = [(whole[len(home) + 1 :], whole) for whole in _TOLD if whole.startswith(f"{home}.")]
                self._imports.update(names)
            elif isinstance(part, Function):
                self._around[id(part)] = scope
                (self._functions if kind is None else self._methods).setdefault(part.name, []).append(part)
                if any(last_name(each) in ("property", "cached_property") for each in part.decorator_list):
                    self._properties.add(part.name)
                self._read(part.body, part)
            elif isinstance(part, ast.ClassDef):
                self._classes[part.name] = part
                self._read(part.body, scope, part)
            elif isinstance(part, ast.Assign):
                self._assigns.append(part)
                if isinstance(part.value, ast.Lambda):
                    self._around[id(part.value)] = scope
            else:
                for name in ("body", "orelse", "finalbody", "handlers", "cases"):
                    self._read(getattr(part, name, ()), scope, kind)

    def _own(self, scope: ast.AST) -> set[str]:
        """Returns the names that are a function's own."""
        found = self._locals.get(id(scope))
        if found is None:
            assert isinstance(scope, Function | ast.Lambda)
            body: Sequence[ast.AST] = [scope.body] if isinstance(scope, ast.Lambda) else scope.body
            given = {each.arg for each in ast.walk(scope.args) if isinstance(each, ast.arg)}
            open_names = {
                name for each in ast.walk(scope) if isinstance(each, ast.Global | ast.Nonlocal) for name in each.names
            }
            found = self._locals[id(scope)] = (stored(body) | given) - open_names
        return found

    def _home(self, path: str, scope: ast.AST) -> ast.AST:
        """Returns the function that a name belongs to, or the script."""
        name = root(path)
        while isinstance(scope, Function | ast.Lambda) and name not in self._own(scope):
            scope = self._around.get(id(scope), self._tree)
        return scope

    def _aliases(self) -> None:
        """Reads names that are given functions: `now = time.time`, `spent = clock()` of a function that returns one."""
        for node in self._assigns:
            if not isinstance(node.targets[0], ast.Name):
                continue
            name, value = node.targets[0].id, node.value
            if isinstance(value, ast.Lambda):
                self._functions.setdefault(name, []).append(value)
            elif isinstance(value, ast.Attribute | ast.Name) and self._whole(value) in _TOLD | _OF_FILES:
                self._imports[name] = self._whole(value)
            elif isinstance(value, ast.Call) and isinstance(value.func, ast.Name):
                for made in self._functions.get(value.func.id, ()):
                    for part in ast.walk(made):
                        if isinstance(part, ast.Return) and isinstance(part.value, ast.Lambda):
                            self._around[id(part.value)] = made
                            self._functions.setdefault(name, []).append(part.value)
                        elif isinstance(part, ast.Return) and isinstance(part.value, ast.Name):
                            inner = [
                                each
                                for each in self._functions.get(part.value.id, ())
                                if self._around.get(id(each)) is made
                            ]
                            self._functions.setdefault(name, []).extend(inner)

    def _whole(self, node: ast.AST) -> str:
        """Returns the whole name of something that is imported: `time.time` of `now`, of which it was said that it is that."""
        path = path_of(node)
        first, dot, rest = path.partition(".")
        return (
            f"{self._imports[first]}{dot}{rest}"
            if first in self._imports
            else path
            if first in ("input", *_NUMBERS)
            else ""
        )

    def _leading(self) -> set[str]:
        """Returns the names of the functions that come to a loop that trains: they are no parts of a step."""
        functions = [part for each in (self._functions, self._methods) for row in each.values() for part in row]
        words = {id(part): {last_name(node) for node in ast.walk(part)} for part in functions}
        names = {id(part): getattr(part, "name", "") for part in functions}
        found = {names[id(part)] for part in functions if any(id(node) in self._training for node in ast.walk(part))}
        while more := {names[key] for key, held in words.items() if held & found} - found:
            found |= more
        return found

    def run(self) -> None:
        """Goes through all loops that no other one contains, and through functions that others call meanwhile."""
        for _ in range(_MAX_ROUNDS):
            before = [{key: dict(held) for key, held in each.items()} for each in (self._free, self._afar)]
            self._memo.clear()
            self._apart(self._attributes_set)
            for loop in self._loops:
                scope = scope_of(self._tree, loop)
                frame = _Frame(scope, {})
                for statement, is_plain in _before(scope, loop):
                    self._above(statement, frame, is_plain=is_plain)
                frame.names = {path: kept for path, held in frame.names.items() if (kept := without_files(held))}
                self._one(loop, frame)
            for node in ast.walk(self._tree):
                if isinstance(node, ast.Call):
                    self._handed_on(node)
            for method in self._methods.get("get_lr", ()):  # of a scheduler
                self._sink(plain(self._call(method, {}, _Frame(self._tree, {}))[0]), method)
            for kind in self._classes.values():
                if any(last_name(base) == "Thread" for base in kind.bases):
                    self._thread(kind)
            for method in (part for name in _BY_OTHERS for part in self._methods.get(name, ())):
                value, _names = self._call(method, {}, _Frame(self._tree, {}))
                self._sink(without_files(value.get("", NONE)), method)
            if [self._free, self._afar] == before:
                return

    def _apart(self, go: Callable[[], None]) -> None:
        """Does something of which nothing stays that trains, or that names hold."""
        held = [{key: dict(held) for key, held in each.items()} for each in (self._free, self._afar)]
        found = dict(self.found)
        go()
        self.found, (self._free, self._afar) = found, held
        self._memo.clear()

    def _attributes_set(self) -> None:
        """Notes the functions that attributes are given anywhere: by an assignment, or as an object is made."""
        for node in ast.walk(self._tree):
            frame = _Frame(self._tree, dict(self._free.get(id(self._tree), {})))
            if isinstance(node, ast.Call) and last_name(node.func) in self._classes:
                self._eval(node, frame)
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute):
                self._one(node, frame)
            elif isinstance(node, ast.ClassDef):
                for part in node.body:
                    if isinstance(part, ast.Assign | ast.AnnAssign) and (value := self._eval(part.value, frame)):
                        name = last_name(part.targets[0] if isinstance(part, ast.Assign) else part.target)
                        self._attributes[name] = merged(self._attributes.get(name, {}), value)
        called = {last_name(node.func) for node in ast.walk(self._tree) if isinstance(node, ast.Call)}
        calls = self._calls  # these take none of those that the loops may make
        for method in (part for name in self._methods.keys() - called for part in self._methods[name]):
            if isinstance(method, Function) and not method.name.startswith(
                "__"
            ):  # it is called by a name that is made, or by a package
                names = self._call(method, {}, _Frame(self._tree, {}))[1]
                self._stored_on(method, {}, names, None, _Frame(self._tree, {}), own=True)
        self._calls = calls

    def _above(self, statement: ast.stmt, frame: _Frame, *, is_plain: bool) -> None:
        """Goes through a statement above the loop; of one that is not plain only the functions stay that it gives to names."""
        calls = [node for node in ast.walk(statement) if isinstance(node, ast.Call)]
        made = [each for call in calls for each in self._functions.get(last_name(call.func), ())]
        if is_plain or (isinstance(statement, ast.Assign) and made and all(map(_is_generator, made))):
            self._one(statement, frame)
            return
        tried = _Frame(frame.scope, dict(frame.names))
        self._apart(lambda: self._one(statement, tried))
        for path, sources in tried.names.items():
            if path.endswith("()"):
                whole = tried.names.get(path[:-2], NONE) & sources
                self._set(
                    path[:-2], {part: held for part, held in (("()", sources), ("", whole)) if held}, frame, weak=True
                )

    def _handed_on(self, node: ast.Call) -> None:
        """Goes through the functions that a call is given: what they train by, or set, and when they run."""
        whole, given = self._whole(node.func), [*node.args, *(word.value for word in node.keywords)]
        if whole in _ALARMS and not _is_zero(node):
            self._alarm(node, given if whole == "threading.Timer" else self._handlers())
            return
        if last_name(node.func) == "Thread" and (slept := [part for part in given if self._sleeps(part)]):
            self._alarm(node, slept)
            return
        for part in given:
            if isinstance(part, ast.Lambda | ast.Name):
                value = self._reference(part, _Frame(self._tree, {}))
                if last_name(node.func).endswith("LR"):
                    self._sink(everything(value), node)

    def _handlers(self) -> list[ast.expr]:
        """Returns what is called at an alarm."""
        found = [
            node
            for node in ast.walk(self._tree)
            if isinstance(node, ast.Call) and self._whole(node.func) == "signal.signal"
        ]
        return [node.args[1] for node in found if len(node.args) > 1 and "ALRM" in ast.unparse(node.args[0])]

    def _thread(self, kind: ast.ClassDef) -> None:
        """Goes through what a thread of the script's sets once it has slept."""
        for method in self._of_class(kind, ("run",)):
            if self._sleeps(method):
                place = ast.copy_location(ast.Name(f"{kind.name}.run()"), method)
                asked = everything(self._asked(ast.Call(place, [], []), place))
                frame = _Frame(self._tree, {}, asked, trains=True)
                self._stored_on(method, {}, self._call(method, {}, frame)[1], None, frame, own=False)

    def _sleeps(self, node: ast.AST) -> bool:
        made = self._functions.get(node.id, []) if isinstance(node, ast.Name) else [node]
        calls = [part for each in made for part in ast.walk(each) if isinstance(part, ast.Call)]
        return any(last_name(call.func) == "sleep" or (last_name(call.func) == "wait" and call.args) for call in calls)

    def _alarm(self, node: ast.Call, handlers: Sequence[ast.expr]) -> None:
        """Goes through what runs when a time is over: what it does hangs on that."""
        asked = everything(self._asked(node, node))
        self._alarms |= asked
        if not handlers:
            self._sink(asked, node)
        scope = ast.parse("lambda: 0", mode="eval").body
        self._around[id(scope)], self._scopes = scope_of(self._tree, node), [*self._scopes, scope]
        frame = _Frame(scope, {}, asked, trains=True)
        for each in handlers:
            if isinstance(each, ast.Lambda):
                self._around.setdefault(id(each), scope_of(self._tree, node))
                self._call(each, {}, frame)
            elif isinstance(each, ast.Name | ast.Attribute):
                self._called(ast.copy_location(ast.Call(each, [], []), node), frame, alone=True)

    # What is held where.

    def _held(self, path: str, frame: _Frame) -> dict[str, Sources]:
        """Returns the names where a path is looked up."""
        scope = self._home(path, frame.scope)
        return frame.names if scope is frame.scope else self._free.get(id(scope), {})

    def _value_of(self, path: str, frame: _Frame) -> Value:
        found: Value = {}
        afar = self._afar.get(id(self._home(path, frame.scope)), {})
        for held, sources in (*self._held(path, frame).items(), *afar.items()):
            if path == held or is_part(path, held):
                add(found, "", sources)
            elif is_part(held, path):
                add(found, held[len(path) :], sources)
        for place, _ in (each for each in enumerate(path) if each[1] == "."):
            name = root(path[place + 1 :])
            if name in self._attributes:
                found = merged(found, part_of(self._attributes[name], path[place + 1 + len(name) :]))
        return found

    def _set(self, path: str, value: Value, frame: _Frame, *, weak: bool = False) -> None:
        if not path:
            return
        names = self._held(path, frame)
        mine = names is frame.names
        if mine and not weak:
            for held in [held for held in names if held == path or is_part(held, path)]:
                del names[held]
        elif not mine:
            names = self._free.setdefault(id(self._home(path, frame.scope)), {})
        for part, sources in value.items():
            add(names, path + part, sources)
            if not mine:
                add(self._afar.setdefault(id(self._home(path, frame.scope)), {}), path + part, sources)
            if mine:  # functions inside may read it
                add(self._free.setdefault(id(frame.scope), {}), path + part, sources)

    def _sink(self, sources: Sources, node: ast.AST) -> None:
        leaves = isinstance(node, ast.Call) and self._is_exit(node)
        ends = leaves or isinstance(node, ast.Break | ast.Return | ast.Raise | ast.Assert)
        for source in sources:
            line, only_ends = self.found.get(source, (getattr(node, "lineno", 0), True))
            self.found[source] = (line, only_ends and ends)

    def _is_exit(self, node: ast.Call) -> bool:
        """Tell whether a call ends the script."""
        return self._whole(node.func) in _EXITS or (
            isinstance(node.func, ast.Name) and node.func.id in ("exit", "quit")
        )

    # Statements.

    def _block(self, statements: Sequence[ast.stmt], frame: _Frame) -> None:
        control = frame.control
        for statement in statements:
            self._one(statement, frame)
            if (
                isinstance(statement, ast.If)
                and (held := plain(self._eval(statement.test, frame)))
                and _leaves(statement)
            ):
                frame.control |= held  # what follows runs only if it did not leave
        frame.control = control

    def _one(self, node: ast.stmt, frame: _Frame) -> None:
        go = self._kinds.get(type(node))
        if go is not None:
            go(node, frame)
        elif isinstance(node, ast.Assert):
            self._raises(node, frame, plain(self._eval(node.test, frame)))

    @functools.cached_property
    def _kinds(self) -> dict[type, Callable[[Any, _Frame], Any]]:
        """Return how each kind of statement is gone through."""
        return {
            ast.Assign: self._gives, ast.AnnAssign: self._gives_one, ast.AugAssign: self._adds, ast.Return: self._returns, ast.If: self._if,
            ast.For: self._for, ast.AsyncFor: self._for, ast.While: self._while, ast.With: self._with, ast.AsyncWith: self._with, **dict.fromkeys(TRY, self._try),
            ast.Match: self._match, ast.Break: self._leaves, ast.Continue: self._leaves, ast.Raise: self._raises,
            ast.Expr: lambda node, frame: self._eval(node.value, frame, alone=True),
        }  # fmt: skip

    def _gives(self, node: ast.Assign, frame: _Frame) -> None:
        value = self._eval(node.value, frame)
        if isinstance(node.value, ast.Subscript) and last_name(node.value.value) == "param_groups":
            frame.rates |= stored(node.targets)
        for target in node.targets:
            self._assign(target, value, frame)

    def _gives_one(self, node: ast.AnnAssign, frame: _Frame) -> None:
        if node.value is not None:
            self._assign(node.target, self._eval(node.value, frame), frame)

    def _adds(self, node: ast.AugAssign, frame: _Frame) -> None:
        held = everything(self._eval(node.value, frame)) | everything(self._eval(node.target, frame))
        if root(path_of(node.target)) in frame.rates:
            self._sink(held, node)
        self._assign(node.target, {"": held} if held else {}, frame)

    def _while(self, node: ast.While, frame: _Frame) -> None:
        held = plain(self._eval(node.test, frame))
        frame.loops.append(node)
        self._twice(lambda: self._under(held, node.body, frame), frame)
        frame.loops.pop()
        self._block(node.orelse, frame)

    def _with(self, node: ast.With | ast.AsyncWith, frame: _Frame) -> None:
        for item in node.items:
            value = self._eval(item.context_expr, frame)
            if item.optional_vars is not None:
                self._assign(item.optional_vars, value, frame)
        self._block(node.body, frame)

    def _try(self, node: ast.Try, frame: _Frame) -> None:
        for block in (node.body, *(handler.body for handler in node.handlers), node.orelse, node.finalbody):
            self._weakly(block, frame)

    def _match(self, node: ast.Match, frame: _Frame) -> None:
        held = everything(self._eval(node.subject, frame))
        for case in node.cases:
            for name in stored([case.pattern]) if held else ():
                self._set(name, {"": held}, frame, weak=True)
            if case.guard is not None:
                held |= plain(self._eval(case.guard, frame))
            self._weakly(case.body, frame, held)

    def _leaves(self, node: ast.Break | ast.Continue, frame: _Frame) -> None:
        if frame.control and frame.loops and id(frame.loops[-1]) in self._training:
            self._sink(frame.control, node)
        elif isinstance(frame.scope, Function) and any(isinstance(each, ast.Yield) for each in ast.walk(frame.scope)):
            add(frame.returned, "", frame.control)  # of a generator

    def _raises(self, node: ast.Raise | ast.Assert, frame: _Frame, held: Sources = NONE) -> None:
        if any(id(loop) in self._training for loop in frame.loops):
            self._sink(frame.control | held, node)
        elif frame.trains:
            self._sink(without_files(frame.control | held), node)

    def _returns(self, node: ast.Return, frame: _Frame) -> None:
        if frame.control and any(id(loop) in self._training for loop in frame.loops):
            self._sink(frame.control, node)
        for part, sources in self._eval(node.value, frame).items():
            add(frame.returned, part, sources)
        add(frame.returned, "", frame.control)

    def _if(self, node: ast.If, frame: _Frame) -> None:
        held = plain(self._eval(node.test, frame))
        before = dict(frame.names)
        self._under(held, node.body, frame)
        then, frame.names = frame.names, before
        self._under(held, node.orelse, frame)
        for path, sources in then.items():
            add(frame.names, path, sources)

    def _weakly(self, block: Sequence[ast.stmt], frame: _Frame, held: Sources = NONE) -> None:
        before = dict(frame.names)
        self._under(held, block, frame)
        for path, sources in before.items():
            add(frame.names, path, sources)

    def _under(self, held: Sources, block: Sequence[ast.stmt], frame: _Frame) -> None:
        control = frame.control
        frame.control = control | held
        self._block(block, frame)
        frame.control = control

    def _for(self, node: ast.For | ast.AsyncFor, frame: _Frame) -> None:
        value = self._eval(node.iter, frame)
        value = merged(value, self._special(node.iter, ("__iter__", "__next__"), frame))
        if id(node) in self._training:  # how many steps there are; the text of a progress bar is no part of that
            drawn = isinstance(node.iter, ast.Call) and last_name(node.iter.func) in {*self._functions, *self._classes}
            self._sink(everything(value) if frame.loops or drawn else value.get("()", NONE), node)
        text = ast.unparse(node.iter)
        if "param_groups" in text or "parameters" in text:
            frame.rates |= stored([node.target])
        frame.loops.append(node)
        often = plain(value) if isinstance(node.iter, ast.Call) and last_name(node.iter.func) == "range" else NONE
        if frame.control and self._drawing.draws(node.iter):
            self._felt(frame, node)
        items = {"": held} if (held := plain(value) | functions_in(value)) else {}

        def turn() -> None:
            self._assign(node.target, items, frame)
            self._under(often, node.body, frame)

        self._twice(turn, frame)
        frame.loops.pop()
        self._block(node.orelse, frame)

    def _twice(self, turn: Callable[[], None], frame: _Frame) -> None:
        for _ in range(2):
            before = dict(frame.names)
            turn()
            for path, sources in before.items():
                add(frame.names, path, sources)

    def _assign(self, target: ast.expr, value: Value, frame: _Frame) -> None:
        if isinstance(target, ast.Tuple | ast.List):
            for place, part in enumerate(target.elts):
                self._assign(part, part_of(value, f"[{place}]"), frame)
            return
        if isinstance(target, ast.Starred):
            self._assign(target.value, {"": everything(value)} if value else {}, frame)
            return
        if frame.control:
            value = merged(value, {"": frame.control})
        path = path_of(target)
        if isinstance(target, ast.Attribute) and (
            made := {part: held for part, held in value.items() if part.endswith("()") or held & self._alarms}
        ):
            self._attributes[target.attr] = merged(self._attributes.get(target.attr, {}), made)
        if path.rpartition(".")[2].partition("[")[0] == "param_groups" and path.count("[") < 2:
            self._sink(everything(value), target)
        if isinstance(target, ast.Subscript):
            key = target.slice.value if isinstance(target.slice, ast.Constant) else None
            base = path_of(target.value)
            if key in _RATES and ("group" in base or base in ("g", "pg") or root(base) in frame.rates):
                self._sink(everything(value), target)
            if not path:  # of a list or a dict, at a place that the text does not tell
                self._set(base, {"": everything(value)} if value else {}, frame, weak=True)
                return
        self._set(path, value, frame)

    # Expressions.

    def _eval(self, node: ast.expr | None, frame: _Frame, *, alone: bool = False) -> Value:
        """Returns what an expression holds of the world outside. `alone`: nothing takes its value."""
        if node is None or isinstance(node, ast.Constant):
            return {}
        if isinstance(node, ast.Call):
            return self._called(node, frame, alone=alone)
        go = self._expressions.get(type(node))
        return self._rest(node, frame) if go is None else go(node, frame)

    @functools.cached_property
    def _expressions(self) -> dict[type, Callable[[Any, _Frame], Value]]:
        """Return how each kind of expression is gone through."""
        return {
            ast.Name: self._loaded, ast.Attribute: self._loaded, ast.Subscript: self._loaded, ast.Lambda: self._reference,
            ast.Tuple: self._parts, ast.List: self._parts, ast.Dict: self._parts, ast.IfExp: self._choice, ast.BoolOp: self._choice,
            ast.ListComp: self._comprehension, ast.SetComp: self._comprehension, ast.GeneratorExp: self._comprehension,
            ast.DictComp: self._comprehension, ast.NamedExpr: self._named, ast.Yield: self._yields, ast.YieldFrom: self._yields,
        }  # fmt: skip

    def _named(self, node: ast.NamedExpr, frame: _Frame) -> Value:
        value = self._eval(node.value, frame)
        self._assign(node.target, value, frame)
        return value

    def _yields(self, node: ast.Yield | ast.YieldFrom, frame: _Frame) -> Value:
        add(frame.returned, "", without_files(everything(self._eval(node.value, frame)) | frame.control))
        return {}

    def _rest(self, node: ast.expr, frame: _Frame) -> Value:
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):  # of two dicts
            return merged(self._eval(node.left, frame), self._eval(node.right, frame))
        held = NONE
        for part in ast.iter_child_nodes(node):
            if isinstance(part, ast.expr):
                held |= plain(self._eval(part, frame))
                if isinstance(node, ast.BinOp):
                    held |= self._number(part)
        return {"": held} if held else {}

    def _choice(self, node: ast.IfExp | ast.BoolOp, frame: _Frame) -> Value:
        """Returns what `a if b else c` or `late and sys.exit()` holds; a part runs, or not, by what stands before it."""
        control, held = frame.control, NONE
        found: Value = {}
        if isinstance(node, ast.BoolOp):
            for part in node.values:
                held |= plain(self._eval(part, frame))
                frame.control = control | held
        else:
            held = plain(self._eval(node.test, frame))
            frame.control = control | held
            found = merged(self._eval(node.body, frame), self._eval(node.orelse, frame))
        frame.control = control
        return merged(found, {"": held} if held else {})

    def _parts(self, node: ast.Tuple | ast.List | ast.Dict, frame: _Frame) -> Value:
        rows: list[tuple[str, ast.expr]] = (
            [
                (f"[{key.value!r}]" if isinstance(key, ast.Constant) else "", each)
                for key, each in zip(node.keys, node.values, strict=True)
            ]
            if isinstance(node, ast.Dict)
            else [(f"[{place}]", each) for place, each in enumerate(node.elts)]
        )
        found: Value = {}
        for name, each in rows:
            for part, held in self._eval(each, frame).items():
                add(found, name + part, held)
        return found

    def _number(self, node: ast.AST) -> Sources:
        """Returns the identity or the hash that a number is made of; one that is only compared or looked up is none."""
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _NUMBERS and node.args:
            of = node.args[0]
            if node.func.id == "id" or not (isinstance(of, ast.Constant) and isinstance(of.value, int)):
                return frozenset({Source(ast.unparse(node), node.lineno, False, node)})
        return NONE

    def _comprehension(
        self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp, frame: _Frame
    ) -> Value:
        inner = _Frame(
            frame.scope,
            dict(frame.names),
            frame.control,
            depth=frame.depth,
            loops=frame.loops,
            rates=frame.rates,
            trains=frame.trains,
        )
        held = NONE
        for each in node.generators:
            value = self._eval(each.iter, inner)
            for name in stored([each.target]):
                inner.names = {path: kept for path, kept in inner.names.items() if root(path) != name}
                if value:
                    inner.names[name] = everything(value)
            if frame.control and self._drawing.draws(each.iter):
                self._felt(frame, node)
            for test in each.ifs:
                held |= everything(self._eval(test, inner))
        for part in (node.key, node.value) if isinstance(node, ast.DictComp) else (node.elt,):
            held |= everything(self._eval(part, inner))
        return {"": held} if held else {}

    def _loaded(self, node: ast.Name | ast.Attribute | ast.Subscript, frame: _Frame) -> Value:
        if isinstance(node, ast.Subscript):
            if "RESTART_COUNT" in ast.unparse(node.slice):
                return self._asked(ast.Call(node, [], []), node)
            if not path_of(node):
                index = everything(self._eval(node.slice, frame)) if not isinstance(node.slice, ast.Slice) else NONE
                if isinstance(node.slice, ast.Slice):
                    index = NONE.union(
                        *(
                            everything(self._eval(each, frame))
                            for each in (node.slice.lower, node.slice.upper, node.slice.step)
                        )
                    )
                mine = self._eval(node.value, frame)
                held, functions = index | plain(mine), functions_in(mine)
                return {part: each for part, each in (("", held), ("()", functions)) if each}
        if isinstance(node, ast.Attribute) and node.attr in self._properties:
            return self._methods_called(node, _NOTHING_GIVEN, frame)
        path = path_of(node)
        if path:
            return merged(self._value_of(path, frame), self._reference(node, frame))
        if isinstance(node, ast.Attribute):
            return part_of(self._eval(node.value, frame), f".{node.attr}")
        return (
            part_of(self._eval(node.value, frame), f"[{ast.unparse(node.slice)}]")
            if isinstance(node, ast.Subscript)
            else {}
        )

    def _reference(self, node: ast.expr, frame: _Frame) -> Value:
        """Returns what a function would return that is named here, and not called."""
        apart = _Frame(frame.scope, frame.names, depth=frame.depth, trains=frame.trains)
        held, whole = NONE, self._whole(node)
        if whole in _TOLD - {"input"}:
            held = everything(self._asked(ast.Call(node, [], []), node))
        elif isinstance(node, ast.Lambda):
            self._around.setdefault(id(node), frame.scope)
            held = everything(self._call(node, {}, apart)[0])
        elif last_name(node) in self._leads:
            return {}
        elif isinstance(node, ast.Attribute) and node.attr in self._methods:
            held = everything(self._methods_called(node, _NOTHING_GIVEN, apart))
        elif last_name(node) in self._functions and (isinstance(node, ast.Name) or _may_be_own(whole)):
            held = NONE.union(
                *(everything(self._call(each, {}, apart)[0]) for each in self._functions[last_name(node)])
            )
        return {"()": held} if held else {}

    def _asked(self, node: ast.Call, place: ast.expr, *, is_file: bool = False) -> Value:
        return {"": frozenset({Source(ast.unparse(place), place.lineno, is_file, node)})}

    def _called(self, node: ast.Call, frame: _Frame, *, alone: bool) -> Value:
        name = last_name(node.func)
        whole = self._whole(node.func)
        given = _Given(
            [self._eval(each.value if isinstance(each, ast.Starred) else each, frame) for each in node.args],
            {word.arg or "**": self._eval(word.value, frame) for word in node.keywords},
        )
        passed = given.functions.union(*(plain(value) for value in (*given.places, *given.words.values())))
        if name in _SUMS and isinstance(node.func, ast.Name):
            for each in node.args:  # whatever lies under any name
                if isinstance(each, ast.Call) and isinstance(each.func, ast.Attribute) and each.func.attr == "values":
                    passed |= everything(self._eval(each.func.value, frame))
        self._judge(node, name, whole, passed, frame)
        if frame.control and self._drawing.is_felt(node, whole):
            self._felt(frame, node)
        for target, value in stores(node):
            self._assign(target, merged(self._value_of(path_of(target), frame), self._eval(value, frame)), frame)
        if name == "update" and isinstance(node.func, ast.Attribute):
            self._sink(self._rates_set(node, given, frame), node)
        if whole in _TOLD or (whole in (*_UNSEEDED, "random.seed", "torch.seed") and not node.args):
            return self._asked(node, node)
        if whole in _OF_FILES or (
            name in _FILE_METHODS and isinstance(node.func, ast.Attribute) and not whole and not alone
        ):
            return self._asked(node, node, is_file=True)
        if "RESTART_COUNT" in "".join(ast.unparse(each) for each in node.args[:1] if isinstance(each, ast.Constant)):
            return self._asked(node, node)
        if name in _KEYED:
            return functools.reduce(merged, given.places, _keyed(_KEYED[name], given.words))
        if name in _QUIET and isinstance(node.func, ast.Name):
            return {}
        return self._returned(node, given, passed, frame, alone=alone)

    def _returned(self, node: ast.Call, given: _Given, passed: Sources, frame: _Frame, *, alone: bool) -> Value:
        """Returns what comes of a call: by what its name was given, by a function, a class or methods of the script, or by another."""
        name, whole = last_name(node.func), self._whole(node.func)
        if isinstance(node.func, ast.Name | ast.Attribute):
            path = path_of(node.func)
            own = self._value_of(path, frame).get("()", NONE) if path else NONE
        else:
            own = everything(self._eval(node.func, frame))
        found: Value = {"": own} if own else {}
        if name in self._functions and (isinstance(node.func, ast.Name) or _may_be_own(whole)):
            for function in self._functions[name]:
                bound = self._bound(function, given, own=False)
                value, names = self._call(function, bound, frame)
                self._stored_on(function, bound, names, node, frame, own=False)
                found = merged(found, value)
            return found
        if name in self._classes and (isinstance(node.func, ast.Name) or _may_be_own(whole)):
            return merged(found, self._new(self._classes[name], given, passed, frame))
        found = merged(found, self._special(node.func, ("__call__",), frame, given, node))
        if isinstance(node.func, ast.Attribute) and node.func.attr in self._methods:
            found = merged(found, self._methods_called(node.func, given, frame, node))
            return merged(found, self._passes(node, given, passed, frame, alone=alone, known=True))
        return merged(found, self._passes(node, given, passed, frame, alone=alone, known=False))

    def _of_class(self, kind: ast.ClassDef | None, names: Sequence[str], *below: ast.ClassDef) -> list[Function]:
        """Returns the methods of these names that a class of the script has, or one that it is made from.

        Args:
            kind: the class; None if it is none of the script.
            names: of the methods.
            below: the classes that are made from it; one of them has only the name of what it is made from.
        """
        if kind is None or kind in below:
            return []
        found = [part for part in kind.body if isinstance(part, Function) and part.name in names]
        bases = [self._classes.get(last_name(base)) for base in kind.bases]
        return found or [part for base in bases for part in self._of_class(base, names, kind, *below)]

    def _new(self, kind: ast.ClassDef, given: _Given, passed: Sources, frame: _Frame) -> Value:
        """Returns what an object of a class holds that is made."""
        found: Value = {f".{word}{part}": held for word, value in given.words.items() for part, held in value.items()}
        inits = self._of_class(kind, ("__init__",))
        if not inits:
            return merged(found, {"": passed} if passed else {})
        names = self._call(inits[0], self._bound(inits[0], given, own=True), frame)[1]
        first = inits[0].args.args[0].arg if inits[0].args.args else ""
        found = {held[len(first) :]: sources for held, sources in names.items() if is_part(held, first)}
        handed = (node for node in ast.walk(inits[0]) if isinstance(node, ast.Call) and (node.args or node.keywords))
        return merged(
            found, {"": passed} if passed and any(last_name(each.func) == "__init__" for each in handed) else {}
        )

    def _special(
        self,
        of: ast.expr,
        names: Sequence[str],
        frame: _Frame,
        given: _Given = _NOTHING_GIVEN,
        call: ast.Call | None = None,
    ) -> Value:
        """Returns what methods return that Python calls by itself, of an object that is made here, or that a name was given."""
        made = last_name(of.func) if isinstance(of, ast.Call) else self._made.get(last_name(of), "")
        mine, found = self._value_of(path_of(of), frame), Value()
        for method in self._of_class(self._classes.get(made), names):
            bound = self._bound(method, given, own=True)
            if method.args.args:
                bound[method.args.args[0].arg] = {part: held for part, held in mine.items() if part}
            value, held = self._call(method, bound, frame)
            self._stored_on(method, bound, held, call, frame, own=True)
            found = merged(found, value)
        return found

    def _passes(
        self, node: ast.Call, given: _Given, passed: Sources, frame: _Frame, *, alone: bool, known: bool
    ) -> Value:
        """Returns what a function that nobody knows makes of what it is given; its object keeps that, if nothing takes it."""
        held, name = passed, last_name(node.func)
        functions = given.functions
        if isinstance(node.func, ast.Attribute):
            path = path_of(node.func.value)
            mine = self._eval(node.func.value, frame)
            functions |= mine.get("()", NONE) | part_of(mine, f".{name}").get("()", NONE)
            if not known:
                named = node.args[0] if name in ("get", "pop", "setdefault") and node.args else None
                held |= (
                    everything(part_of(mine, f"[{named.value!r}]"))
                    if isinstance(named, ast.Constant)
                    else plain(mine) | functions_in(mine)
                )
            keyed: Value = {}
            if name == "update":  # each lies under its name
                rows = [_keyed(form, given.words) for form in ("[{!r}]", ".{}")]
                keyed = functools.reduce(merged, (*given.places, *rows), keyed)
                passed = given.unnamed
            kept = passed | (frame.control if alone and name in _TELLS else NONE)
            if alone and (kept or keyed) and path and root(path) not in self._imports and not known and path != "self":
                self._set(path, {**keyed, "": kept, **({"()": functions} if functions else {})}, frame, weak=True)
            if name in _NOTHING:
                return {}
        elif isinstance(node.func, ast.Name):
            mine = self._value_of(node.func.id, frame) if node.func.id != "self" else {}
            held |= everything(mine)
        if known:
            return {}
        return {part: each for part, each in (("", held), ("()", functions)) if each}

    def _judge(self, node: ast.Call, name: str, whole: str, passed: Sources, frame: _Frame) -> None:
        """Looks at a call that trains."""
        own = NONE
        path = path_of(node.func.value) if isinstance(node.func, ast.Attribute) else ""
        if isinstance(node.func, ast.Attribute) and name == "backward":
            own = everything(self._eval(node.func.value, frame)) | passed | frame.control
        elif (
            isinstance(node.func, ast.Attribute)
            and name == "step"
            and not any(word in path.lower() for word in _NO_TRAINER)
        ):
            own = passed | frame.control
            if any(word in path.lower() for word in _TRAINERS):
                own |= everything(self._value_of(path, frame))
        elif name in _SEEDS:
            own = passed | frame.control
            for each in node.args:
                own |= self._number(each)
            alone = isinstance(node.func, ast.Attribute) and not whole and name == "seed" and name not in self._methods
            if (alone or whole in ("random.seed", "torch.seed", "numpy.random.seed")) and not (
                node.args or node.keywords
            ):
                own |= frozenset({Source(ast.unparse(node), node.lineno, False, node)})
        elif name == "load_state_dict" or self._is_exit(node):
            own = frame.control
        elif name.startswith("clip_grad") or (
            name.endswith("_") and name[:1] != "_" and (path.endswith((".data", ".grad")) or root(path) in frame.rates)
        ):
            own = passed
        self._sink(own, node)

    def _felt(self, frame: _Frame, node: ast.AST) -> None:
        """Notes something that the training feels, in a loop that trains, and that runs only by a clock."""
        if frame.trains or any(id(loop) in self._training for loop in frame.loops):
            self._sink(without_files(frame.control), node)

    def _rates_set(self, node: ast.Call, given: _Given, frame: _Frame) -> Sources:
        """Returns where the hyperparameters come from that an `update` sets: those of its text, and of a group whatever it is given."""
        assert isinstance(node.func, ast.Attribute)
        path = path_of(node.func.value)
        own = NONE.union(*(everything(given.words[name]) for name in _RATES & given.words.keys()))
        own |= NONE.union(
            *(everything(part_of(value, f"[{name!r}]")) for value in given.places for name in _RATES if "" not in value)
        )
        if "group" in path or root(path) in frame.rates:
            own |= given.unnamed
        return own

    def _methods_called(
        self,
        func: ast.Attribute,
        given: _Given,
        frame: _Frame,
        call: ast.Call | None = None,
    ) -> Value:
        """Returns what methods of this name return; what they set in their object is set in this one."""
        path = path_of(func.value)
        mine = self._value_of(path, frame) if path else self._eval(func.value, frame)
        found: Value = {}
        for method in self._methods[func.attr]:
            own = not _is_static(method)
            bound = self._bound(method, given, own=own)
            first = method.args.args[0].arg if own and isinstance(method, Function) and method.args.args else ""
            if first:
                bound[first] = {part: held for part, held in mine.items() if part}
            value, names = self._call(method, bound, frame)
            self._stored_on(method, bound, names, call, frame, own=own)
            found = merged(found, value)
            if first and path:
                for held, sources in names.items():
                    if is_part(held, first):
                        self._set(path + held[len(first) :], {"": sources}, frame, weak=True)
        return found

    def _stored_on(
        self,
        function: ast.AST,
        bound: dict[str, Value],
        names: dict[str, Sources],
        call: ast.Call | None,
        frame: _Frame,
        *,
        own: bool,
    ) -> None:
        """Sets what a function stores on a parameter where the caller has that; by the attribute's name alone, if nothing tells where."""
        assert isinstance(function, Function | ast.Lambda)
        args = [each.arg for each in (*function.args.posonlyargs, *function.args.args)][own:]
        passed: dict[str, ast.expr] = {}
        if call is not None:
            passed = {word.arg: word.value for word in call.keywords if word.arg}
            passed.update(zip(args, call.args, strict=False))
        again = stored(function.body) if isinstance(function, Function) else set()
        for held, sources in names.items():
            name = root(held)
            if name not in (*args, *passed) or (held == name and name in again):
                continue
            new = sources - bound.get(name, {}).get(held[len(name) :], NONE)
            if not new:
                continue
            at = passed.get(name)
            path = path_of(at) if at is not None else ""
            if path:
                self._set(path + held[len(name) :], {"": new}, frame, weak=True)
            elif isinstance(at, ast.Subscript):
                self._set(path_of(at.value), {"": new}, frame, weak=True)
            elif held.startswith(f"{name}.") and (word := root(held[len(name) + 1 :])):
                self._attributes[word] = merged(self._attributes.get(word, {}), {"": new})

    def _bound(self, function: ast.AST, given: _Given, *, own: bool) -> dict[str, Value]:
        """Returns what each parameter of a function is given."""
        assert isinstance(function, Function | ast.Lambda)
        names = [each.arg for each in (*function.args.posonlyargs, *function.args.args)]
        bound: dict[str, Value] = {}
        for place, value in enumerate(given.places):
            at = place + own
            if at < len(names):
                bound[names[at]] = value
            elif function.args.vararg is not None and value:
                bound[function.args.vararg.arg] = merged(
                    bound.get(function.args.vararg.arg, {}), {"": everything(value)}
                )
        for name, value in given.words.items():
            if name in names or any(name == each.arg for each in function.args.kwonlyargs):
                bound[name] = value
            elif function.args.kwarg is not None and value:
                bound[function.args.kwarg.arg] = merged(
                    bound.get(function.args.kwarg.arg, {}), {f"[{name!r}]" if name != "**" else "": everything(value)}
                )
        return bound

    def _call(self, function: ast.AST, bound: dict[str, Value], frame: _Frame) -> tuple[Value, dict[str, Sources]]:
        """Returns what a function returns, and what its names hold at its end."""
        names = {name + part: held for name, value in bound.items() for part, held in value.items()}
        trains = frame.trains or any(id(loop) in self._training for loop in frame.loops)
        key = (id(function), frozenset(names.items()), frame.control, trains)
        if key in self._memo:
            return self._memo[key]
        self._calls += 1
        if id(function) in self._running or frame.depth >= _MAX_DEPTH or self._calls > _MAX_CALLS:
            return {}, {}
        self._running.add(id(function))
        inner = _Frame(function, {}, frame.control, depth=frame.depth + 1, trains=trains)
        inner.names = {**self._defaults(function, bound, inner), **names}
        if isinstance(function, ast.Lambda):
            inner.returned = self._eval(function.body, inner, alone=bool(frame.control))
        elif isinstance(function, Function):
            self._block(function.body, inner)
            for each in function.decorator_list:
                for part, held in self._wrapped(each, inner).items():
                    add(inner.returned, part, held)
        self._running.discard(id(function))
        self._memo[key] = inner.returned, inner.names
        return self._memo[key]

    def _wrapped(self, decorator: ast.expr, frame: _Frame) -> Value:
        """Returns what a decorator of the script's adds to what a function returns: `return result, seconds`."""
        name = last_name(decorator.func if isinstance(decorator, ast.Call) else decorator)
        found: Value = {}
        for made in self._functions.get(name, ()):
            for part in ast.walk(made):
                if isinstance(part, Function) and part is not made:
                    found = merged(found, self._call(part, {}, frame)[0])
        return {part: held for part, held in found.items() if part[:1] == "["}

    def _defaults(self, function: ast.AST, bound: dict[str, Value], frame: _Frame) -> dict[str, Sources]:
        """Returns what parameters hold that are not given."""
        assert isinstance(function, Function | ast.Lambda)
        args = [*function.args.posonlyargs, *function.args.args]
        first = len(args) - len(function.args.defaults)
        rows = (
            *zip(args[first:], function.args.defaults, strict=True),
            *zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True),
        )
        home = self._around.get(id(function), self._tree)
        outer = _Frame(home, self._free.get(id(home), {}), depth=frame.depth)
        return {
            each.arg + part: held
            for each, value in rows
            if each.arg not in bound
            for part, held in self._eval(value, outer).items()
        }


def _asked_unseen(trees: Sequence[ast.Module]) -> str:
    """Returns why texts that could not be gone through are not kept; empty if they ask nothing of the world outside."""
    words = {whole.rpartition(".")[2] for whole in (*_TOLD, *_ALARMS)}
    for node in (node for tree in trees for node in ast.walk(tree)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.ImportFrom) else [last_name(node)]
        if isinstance(node, ast.Attribute | ast.ImportFrom) and (told := words & {*names}):
            return (
                f"what {min(told)!r} (line {node.lineno}) goes into cannot be told from the text, and a restart is told "
                f"something else"
            )
    return ""


def _before(scope: ast.AST, loop: ast.AST) -> Iterator[tuple[ast.stmt, bool]]:
    """Yields the statements of a script or a function above a loop, and whether they plainly give something to a name."""
    for name in ("body", "orelse", "finalbody", "handlers", "cases"):
        for statement in getattr(scope, name, ()):
            if any(node is loop for node in ast.walk(statement)):
                if isinstance(statement, _INNER):
                    yield from _before(statement, loop)
                return
            if not isinstance(statement, ast.stmt):
                continue  # another case, or another handler
            calls = [last_name(node.func) for node in ast.walk(statement) if isinstance(node, ast.Call)]
            if isinstance(statement, ast.Assign | ast.AnnAssign):
                yield statement, all(name in _PLAIN for name in calls)
            elif type(statement) is ast.Expr or isinstance(statement, _BLOCKS):
                yield statement, False


def _keyed(form: str, words: Mapping[str, Value]) -> Value:
    """Returns what an object holds that is made of names."""
    rows = ((form.format(word) if word != "**" else "", value) for word, value in words.items())
    return {at + part: held for at, value in rows for part, held in value.items()}


def _is_zero(node: ast.Call) -> bool:
    """Tell whether an alarm is taken back."""
    return any(isinstance(part, ast.Constant) and part.value == 0 for part in node.args)


def _is_static(method: ast.AST) -> bool:
    return any(last_name(each) == "staticmethod" for each in getattr(method, "decorator_list", ()))


def _is_generator(function: ast.AST) -> bool:
    return any(isinstance(each, ast.Yield | ast.YieldFrom) for each in ast.walk(function))


def _may_be_own(whole: str) -> bool:
    """Tell whether a function of this whole name may be one of the script's own modules."""
    return bool(whole) and whole.partition(".")[0] not in _LIBRARIES


def _leaves(node: ast.If) -> bool:
    return any(
        isinstance(block[-1], ast.Return | ast.Continue | ast.Break | ast.Raise)
        for block in (node.body, node.orelse)
        if block
    )
