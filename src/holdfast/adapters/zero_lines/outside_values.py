"""Finds in the text of a script what its loops ask of the world outside and train by: a clock, a file of their own, a process id.

    found = find_outside(tree, loops)
    found.reason        why no restart would train the same: "what 'time.time()' (line 7) tells goes into the training (line 9)"
    found.files         the calls that ask how large a file is, whether it is there, what lies in a directory: the run tells which

Only what goes into the training counts: the loss, hyperparameters, a seed, what a scheduler is given, whether a step is made or the loop
ends. What is only printed, logged or saved does not. Statements are followed in their order, functions of the script with what they
are given. Pure, and no proof: what is handed on through objects of packages, or through functions that the text does not name, is not seen.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from holdfast.checkpoint.usage.clock_names import last_name
from holdfast.checkpoint.usage.name_flow import Function, stored

# What tells something else in every process, by its whole name.
_TOLD = {
    *(f"time.{name}{ns}" for name in ("time", "perf_counter", "monotonic", "process_time", "thread_time") for ns in ("", "_ns")),
    *(f"time.{name}" for name in ("ctime", "localtime", "gmtime", "strftime")), "timeit.default_timer",
    *(f"datetime.{kind}.{name}" for kind in ("datetime", "date") for name in ("now", "utcnow", "today")), "pandas.Timestamp.now",
    "os.getpid", "os.getppid", "os.uname", "os.urandom", "os.getloadavg", "os.times", "socket.gethostname", "platform.node", "uuid.uuid1", "uuid.uuid4",
    "threading.get_ident", "threading.get_native_id", "secrets.token_bytes", "secrets.token_hex", "secrets.randbelow", "secrets.randbits",
    "secrets.choice", "random.SystemRandom", "input", "sys.stdin.read", "sys.stdin.readline", "sys.stdin.readlines",
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
_SEEDS = {
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
# Objects with a `step` that trains nothing.
_NO_TRAINER = ("prof", "bar", "progress", "log", "meter", "timer", "writer", "track")
_MAX_DEPTH, _MAX_CALLS, _MAX_ROUNDS = 16, 3000, 3


@dataclass(frozen=True)
class Source:
    """One place where something is asked.

    Attributes:
        text, line: of the call.
        is_file: whether it is asked of a file.
        node: the call.
    """

    text: str
    line: int
    is_file: bool
    node: ast.Call = field(compare=False)


_Sources: TypeAlias = frozenset[Source]
# What a value holds: a part of it, as "", "[0]", "['lr']" or ".total" -> where that comes from.
_Value: TypeAlias = dict[str, _Sources]
_NONE: _Sources = frozenset()


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
    flow = _Flow(tree, loops, others)
    try:
        flow.run()
    except Exception:  # noqa: BLE001 - a text that nobody foresaw must run all the same
        return Outside()
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


@dataclass(slots=True)
class _Frame:
    """One function, or the script, that is gone through.

    Attributes:
        scope: which.
        names: paths that hold something -> where that comes from.
        control: what decides whether the statement runs.
        returned: what it returns.
        depth: of calls.
        loops: the loops around the statement, the innermost last.
        rates: names that each parameter group, or parameter, is given to.
    """

    scope: ast.AST
    names: dict[str, _Sources]
    control: _Sources = _NONE
    returned: _Value = field(default_factory=dict)
    depth: int = 0
    loops: list[ast.AST] = field(default_factory=list)
    rates: set[str] = field(default_factory=set)


class _Flow:
    """Goes through the loops, and through what they call."""

    def __init__(self, tree: ast.Module, loops: Sequence[ast.For], others: Sequence[ast.Module]) -> None:
        self._tree, self._loops = tree, list(loops)
        self._training = {id(loop) for loop in loops}
        self.found: dict[Source, tuple[int, bool]] = {}  # the line, and whether only the end of a loop hangs on it
        self._imports: dict[str, str] = {}
        self._functions: dict[str, list[ast.AST]] = {}
        self._methods: dict[str, list[ast.AST]] = {}
        self._properties: set[str] = set()
        self._around: dict[int, ast.AST] = {}
        self._locals: dict[int, set[str]] = {}
        self._free: dict[int, dict[str, _Sources]] = {}
        self._memo: dict[tuple[int, frozenset[tuple[str, _Sources]], _Sources], tuple[_Value, dict[str, _Sources]]] = {}
        self._running: set[int] = set()
        self._calls = 0
        self._assigns: list[ast.Assign] = []
        for each in (*others, tree):
            self._read(each.body, each)
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
                self._imports.update({alias.asname or alias.name: f"{home}.{alias.name}" for alias in part.names})
            elif isinstance(part, Function):
                self._around[id(part)] = scope
                (self._functions if kind is None else self._methods).setdefault(part.name, []).append(part)
                if any(last_name(each) in ("property", "cached_property") for each in part.decorator_list):
                    self._properties.add(part.name)
                self._read(part.body, part)
            elif isinstance(part, ast.ClassDef):
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
        root = _root(path)
        while isinstance(scope, Function | ast.Lambda) and root not in self._own(scope):
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
        path = _path(node)
        first, dot, rest = path.partition(".")
        return (
            f"{self._imports[first]}{dot}{rest}"
            if first in self._imports
            else path
            if first in ("input", *_NUMBERS)
            else ""
        )

    def run(self) -> None:
        """Goes through all loops that no other one contains, and through functions that say how a rate changes."""
        for _ in range(_MAX_ROUNDS):
            before = {key: dict(held) for key, held in self._free.items()}
            self._memo.clear()
            for loop in self._loops:
                scope = self._scope(loop)
                frame = _Frame(scope, {})
                for statement in _before(scope, loop):
                    self._one(statement, frame)
                frame.names = {path: kept for path, held in frame.names.items() if (kept := _without_files(held))}
                self._one(loop, frame)
            for node in ast.walk(self._tree):
                if isinstance(node, ast.Call) and last_name(node.func).endswith("LR"):
                    self._schedule(node)
            if self._free == before:
                return

    def _schedule(self, node: ast.Call) -> None:
        for part in (*node.args, *(word.value for word in node.keywords)):
            made = (
                [part]
                if isinstance(part, ast.Lambda)
                else self._functions.get(part.id, [])
                if isinstance(part, ast.Name)
                else []
            )
            for function in made:
                self._sink(_all(self._call(function, {}, _Frame(self._tree, {}))[0]), node)

    def _scope(self, loop: ast.AST) -> ast.AST:
        found: ast.AST = self._tree
        for node in ast.walk(self._tree):
            if isinstance(node, Function) and any(part is loop for part in ast.walk(node)):
                found = node
        return found

    # What is held where.

    def _held(self, path: str, frame: _Frame) -> dict[str, _Sources]:
        """Returns the names where a path is looked up."""
        scope = self._home(path, frame.scope)
        return frame.names if scope is frame.scope else self._free.get(id(scope), {})

    def _value_of(self, path: str, frame: _Frame) -> _Value:
        names = self._held(path, frame)
        if not names:
            return {}
        found: _Value = {}
        for held, sources in names.items():
            if path == held or _is_part(path, held):
                _add(found, "", sources)
            elif _is_part(held, path):
                _add(found, held[len(path) :], sources)
        return found

    def _set(self, path: str, value: _Value, frame: _Frame, *, weak: bool = False) -> None:
        if not path:
            return
        names = self._held(path, frame)
        mine = names is frame.names
        if mine and not weak:
            for held in [held for held in names if held == path or _is_part(held, path)]:
                del names[held]
        elif not mine:
            names = self._free.setdefault(id(self._home(path, frame.scope)), {})
        for part, sources in value.items():
            _add(names, path + part, sources)
            if mine:  # functions inside may read it
                _add(self._free.setdefault(id(frame.scope), {}), path + part, sources)

    def _sink(self, sources: _Sources, node: ast.AST) -> None:
        leaves = isinstance(node, ast.Call) and self._is_exit(node)
        ends = leaves or isinstance(node, ast.Break | ast.Return | ast.Raise)
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
                and (held := _plain(self._eval(statement.test, frame)))
                and _leaves(statement)
            ):
                frame.control |= held  # what follows runs only if it did not leave
        frame.control = control

    def _one(self, node: ast.stmt, frame: _Frame) -> None:
        go = self._kinds.get(type(node))
        if go is not None:
            go(node, frame)
        elif isinstance(node, ast.Assert | ast.Delete):
            for part in ast.iter_child_nodes(node):
                if isinstance(part, ast.expr):
                    self._eval(part, frame)

    @functools.cached_property
    def _kinds(self) -> dict[type, Callable[[Any, _Frame], Any]]:
        """Return how each kind of statement is gone through."""
        return {
            ast.Assign: self._gives, ast.AnnAssign: self._gives_one, ast.AugAssign: self._adds, ast.Return: self._returns, ast.If: self._if,
            ast.For: self._for, ast.AsyncFor: self._for, ast.While: self._while, ast.With: self._with, ast.AsyncWith: self._with, ast.Try: self._try,
            ast.Match: self._match, ast.Break: self._leaves, ast.Continue: self._leaves, ast.Raise: self._raises,
            ast.Expr: lambda node, frame: self._eval(node.value, frame, alone=True),
        }  # fmt: skip

    def _gives(self, node: ast.Assign, frame: _Frame) -> None:
        value = self._eval(node.value, frame)
        for target in node.targets:
            self._assign(target, value, frame)

    def _gives_one(self, node: ast.AnnAssign, frame: _Frame) -> None:
        if node.value is not None:
            self._assign(node.target, self._eval(node.value, frame), frame)

    def _adds(self, node: ast.AugAssign, frame: _Frame) -> None:
        held = _all(self._eval(node.value, frame)) | _all(self._eval(node.target, frame))
        if _root(_path(node.target)) in frame.rates:
            self._sink(held, node)
        self._assign(node.target, {"": held} if held else {}, frame)

    def _while(self, node: ast.While, frame: _Frame) -> None:
        held = _plain(self._eval(node.test, frame))
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
        held = _all(self._eval(node.subject, frame))
        for case in node.cases:
            self._weakly(case.body, frame, held)

    def _leaves(self, node: ast.Break | ast.Continue, frame: _Frame) -> None:
        if frame.control and frame.loops and id(frame.loops[-1]) in self._training:
            self._sink(frame.control, node)

    def _raises(self, node: ast.Raise, frame: _Frame) -> None:
        if frame.control and any(id(loop) in self._training for loop in frame.loops):
            self._sink(frame.control, node)

    def _returns(self, node: ast.Return, frame: _Frame) -> None:
        if frame.control and any(id(loop) in self._training for loop in frame.loops):
            self._sink(frame.control, node)
        if node.value is None:
            return
        for part, sources in self._eval(node.value, frame).items():
            _add(frame.returned, part, sources)
        if frame.control:
            _add(frame.returned, "", frame.control)

    def _if(self, node: ast.If, frame: _Frame) -> None:
        held = _plain(self._eval(node.test, frame))
        before = dict(frame.names)
        self._under(held, node.body, frame)
        then, frame.names = frame.names, before
        self._under(held, node.orelse, frame)
        for path, sources in then.items():
            _add(frame.names, path, sources)

    def _weakly(self, block: Sequence[ast.stmt], frame: _Frame, held: _Sources = _NONE) -> None:
        before = dict(frame.names)
        self._under(held, block, frame)
        for path, sources in before.items():
            _add(frame.names, path, sources)

    def _under(self, held: _Sources, block: Sequence[ast.stmt], frame: _Frame) -> None:
        control = frame.control
        frame.control = control | held
        self._block(block, frame)
        frame.control = control

    def _for(self, node: ast.For | ast.AsyncFor, frame: _Frame) -> None:
        value = self._eval(node.iter, frame)
        if id(node) in self._training and frame.loops:
            self._sink(_all(value), node)  # how many steps there are
        text = ast.unparse(node.iter)
        if "param_groups" in text or "parameters" in text:
            frame.rates |= stored([node.target])
        frame.loops.append(node)
        items = {"": held} if (held := _plain(value)) else {}

        def turn() -> None:
            self._assign(node.target, items, frame)
            self._block(node.body, frame)

        self._twice(turn, frame)
        frame.loops.pop()
        self._block(node.orelse, frame)

    def _twice(self, turn: Callable[[], None], frame: _Frame) -> None:
        for _ in range(2):
            before = dict(frame.names)
            turn()
            for path, sources in before.items():
                _add(frame.names, path, sources)

    def _assign(self, target: ast.expr, value: _Value, frame: _Frame) -> None:
        if isinstance(target, ast.Tuple | ast.List):
            for place, part in enumerate(target.elts):
                self._assign(part, _part(value, f"[{place}]"), frame)
            return
        if isinstance(target, ast.Starred):
            self._assign(target.value, {"": _all(value)} if value else {}, frame)
            return
        if frame.control:
            value = _merged(value, {"": frame.control})
        path = _path(target)
        if isinstance(target, ast.Subscript):
            key = target.slice.value if isinstance(target.slice, ast.Constant) else None
            base = _path(target.value)
            if key in _RATES and ("group" in base or base in ("g", "pg") or _root(base) in frame.rates):
                self._sink(_all(value), target)
            if not path:  # of a list or a dict, at a place that the text does not tell
                self._set(base, {"": _all(value)} if value else {}, frame, weak=True)
                return
        self._set(path, value, frame)

    # Expressions.

    def _eval(self, node: ast.expr | None, frame: _Frame, *, alone: bool = False) -> _Value:
        """Returns what an expression holds of the world outside.

        Args:
            node: the expression.
            frame: where it stands.
            alone: whether nothing takes its value.
        """
        if node is None or isinstance(node, ast.Constant | ast.Lambda):
            return {}
        if isinstance(node, ast.Call):
            return self._called(node, frame, alone=alone)
        if isinstance(node, ast.Name | ast.Attribute | ast.Subscript):
            return self._loaded(node, frame)
        if isinstance(node, ast.Tuple | ast.List | ast.Dict):
            return self._parts(node, frame)
        if isinstance(node, ast.IfExp | ast.BoolOp):
            return self._choice(node, frame)
        if isinstance(node, ast.NamedExpr):
            value = self._eval(node.value, frame)
            self._assign(node.target, value, frame)
            return value
        if isinstance(node, ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp):
            return self._comprehension(node, frame)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):  # of two dicts
            return _merged(self._eval(node.left, frame), self._eval(node.right, frame))
        held = _NONE
        for part in ast.iter_child_nodes(node):
            if isinstance(part, ast.expr):
                held |= _plain(self._eval(part, frame))
                if isinstance(node, ast.BinOp):
                    held |= self._number(part)
        return {"": held} if held else {}

    def _choice(self, node: ast.IfExp | ast.BoolOp, frame: _Frame) -> _Value:
        """Returns what `a if b else c` or `late and sys.exit()` holds; a part runs, or not, by what stands before it."""
        control, held = frame.control, _NONE
        found: _Value = {}
        if isinstance(node, ast.BoolOp):
            for part in node.values:
                held |= _plain(self._eval(part, frame))
                frame.control = control | held
        else:
            held = _plain(self._eval(node.test, frame))
            frame.control = control | held
            found = _merged(self._eval(node.body, frame), self._eval(node.orelse, frame))
        frame.control = control
        return _merged(found, {"": held} if held else {})

    def _parts(self, node: ast.Tuple | ast.List | ast.Dict, frame: _Frame) -> _Value:
        rows: list[tuple[str, ast.expr]] = (
            [
                (f"[{key.value!r}]" if isinstance(key, ast.Constant) else "", each)
                for key, each in zip(node.keys, node.values, strict=True)
            ]
            if isinstance(node, ast.Dict)
            else [(f"[{place}]", each) for place, each in enumerate(node.elts)]
        )
        found: _Value = {}
        for name, each in rows:
            for part, held in self._eval(each, frame).items():
                _add(found, name + part, held)
        return found

    def _number(self, node: ast.AST) -> _Sources:
        """Returns the identity or the hash that a number is made of; one that is only compared or looked up is none."""
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _NUMBERS and node.args:
            of = node.args[0]
            if node.func.id == "id" or not (isinstance(of, ast.Constant) and isinstance(of.value, int)):
                return frozenset({Source(ast.unparse(node), node.lineno, False, node)})
        return _NONE

    def _comprehension(
        self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp, frame: _Frame
    ) -> _Value:
        inner = _Frame(
            frame.scope, dict(frame.names), frame.control, depth=frame.depth, loops=frame.loops, rates=frame.rates
        )
        held = _NONE
        for each in node.generators:
            value = self._eval(each.iter, inner)
            for name in stored([each.target]):
                inner.names = {path: kept for path, kept in inner.names.items() if _root(path) != name}
                if value:
                    inner.names[name] = _all(value)
            for test in each.ifs:
                held |= _all(self._eval(test, inner))
        for part in (node.key, node.value) if isinstance(node, ast.DictComp) else (node.elt,):
            held |= _all(self._eval(part, inner))
        return {"": held} if held else {}

    def _loaded(self, node: ast.Name | ast.Attribute | ast.Subscript, frame: _Frame) -> _Value:
        if isinstance(node, ast.Subscript):
            if "RESTART_COUNT" in ast.unparse(node.slice):
                return self._asked(ast.Call(node, [], []), node)
            if not _path(node):
                index = _all(self._eval(node.slice, frame)) if not isinstance(node.slice, ast.Slice) else _NONE
                if isinstance(node.slice, ast.Slice):
                    index = _NONE.union(
                        *(
                            _all(self._eval(each, frame))
                            for each in (node.slice.lower, node.slice.upper, node.slice.step)
                        )
                    )
                held = index | _plain(self._eval(node.value, frame))
                return {"": held} if held else {}
        if isinstance(node, ast.Attribute) and node.attr in self._properties:
            return self._methods_called(node, [], {}, frame)
        path = _path(node)
        if path:
            return self._value_of(path, frame)
        if isinstance(node, ast.Attribute):
            return _part(self._eval(node.value, frame), f".{node.attr}")
        return (
            _part(self._eval(node.value, frame), f"[{ast.unparse(node.slice)}]")
            if isinstance(node, ast.Subscript)
            else {}
        )

    def _asked(self, node: ast.Call, place: ast.expr, *, is_file: bool = False) -> _Value:
        return {"": frozenset({Source(ast.unparse(place), place.lineno, is_file, node)})}

    def _called(self, node: ast.Call, frame: _Frame, *, alone: bool) -> _Value:
        name = last_name(node.func)
        whole = self._whole(node.func)
        given = [self._eval(each.value if isinstance(each, ast.Starred) else each, frame) for each in node.args]
        words = {word.arg or "**": self._eval(word.value, frame) for word in node.keywords}
        passed = _NONE.union(*(_plain(value) for value in (*given, *words.values())))
        self._judge(node, name, whole, passed, frame)
        if name == "update" and isinstance(node.func, ast.Attribute):
            self._sink(self._rates_set(node, given, words, frame), node)
        if whole in _TOLD or (whole in ("random.seed", "torch.seed") and not node.args):
            return self._asked(node, node)
        if whole in _OF_FILES or (
            name in _FILE_METHODS and isinstance(node.func, ast.Attribute) and not whole and not alone
        ):
            return self._asked(node, node, is_file=True)
        if "RESTART_COUNT" in "".join(ast.unparse(each) for each in node.args[:1] if isinstance(each, ast.Constant)):
            return self._asked(node, node)
        if name in _QUIET and isinstance(node.func, ast.Name):
            return {}
        if name in self._functions and (isinstance(node.func, ast.Name) or _may_be_own(whole)):
            found: _Value = {}
            for function in self._functions[name]:
                found = _merged(found, self._call(function, self._bound(function, given, words, own=False), frame)[0])
            return found
        if isinstance(node.func, ast.Attribute) and node.func.attr in self._methods:
            found = self._methods_called(node.func, given, words, frame)
            return _merged(found, self._passes(node, passed, frame, alone=alone, known=True))
        return self._passes(node, passed, frame, alone=alone, known=False)

    def _passes(self, node: ast.Call, passed: _Sources, frame: _Frame, *, alone: bool, known: bool) -> _Value:
        """Returns what a function that nobody knows makes of what it is given; its object keeps that, if nothing takes it."""
        held = passed
        if isinstance(node.func, ast.Attribute):
            path = _path(node.func.value)
            mine = self._eval(node.func.value, frame)
            if not known:
                named = node.args[0] if node.func.attr in ("get", "pop", "setdefault") and node.args else None
                held |= _all(_part(mine, f"[{named.value!r}]")) if isinstance(named, ast.Constant) else _plain(mine)
            kept = passed | (
                frame.control if alone and node.func.attr in ("append", "add", "update", "extend") else _NONE
            )
            if alone and kept and path and _root(path) not in self._imports and not known and path != "self":
                self._set(path, {"": kept}, frame, weak=True)
        elif isinstance(node.func, ast.Name):
            mine = self._value_of(node.func.id, frame) if node.func.id != "self" else {}
            held |= _all(mine)
        return {"": held} if held and not known else {}

    def _judge(self, node: ast.Call, name: str, whole: str, passed: _Sources, frame: _Frame) -> None:
        """Looks at a call that trains."""
        own = _NONE
        path = _path(node.func.value) if isinstance(node.func, ast.Attribute) else ""
        if isinstance(node.func, ast.Attribute) and name == "backward":
            own = _all(self._eval(node.func.value, frame)) | passed | frame.control
        elif (
            isinstance(node.func, ast.Attribute)
            and name == "step"
            and not any(word in path.lower() for word in _NO_TRAINER)
        ):
            own = passed | frame.control
        elif name in _SEEDS:
            own = passed | frame.control
            for each in node.args:
                own |= self._number(each)
            if whole in ("random.seed", "torch.seed", "numpy.random.seed") and not node.args and not node.keywords:
                own |= frozenset({Source(ast.unparse(node), node.lineno, False, node)})
        elif name == "load_state_dict" or self._is_exit(node):
            own = frame.control
        elif name.startswith("clip_grad") or (
            name.endswith("_") and name[:1] != "_" and (path.endswith((".data", ".grad")) or _root(path) in frame.rates)
        ):
            own = passed
        self._sink(own, node)

    def _rates_set(self, node: ast.Call, given: Sequence[_Value], words: dict[str, _Value], frame: _Frame) -> _Sources:
        """Returns where the hyperparameters come from that an `update` sets: those of its text, and of a group whatever it is given."""
        assert isinstance(node.func, ast.Attribute)
        path = _path(node.func.value)
        own = _NONE.union(*(_all(words[name]) for name in _RATES & words.keys()))
        own |= _NONE.union(
            *(_all(_part(value, f"[{name!r}]")) for value in given for name in _RATES if "" not in value)
        )
        if "group" in path or _root(path) in frame.rates:
            own |= _NONE.union(*(_plain(value) for value in (*given, words.get("**", {}))))
        return own

    def _methods_called(
        self, func: ast.Attribute, given: Sequence[_Value], words: dict[str, _Value], frame: _Frame
    ) -> _Value:
        """Returns what methods of this name return; what they set in their object is set in this one."""
        path = _path(func.value)
        mine = self._value_of(path, frame) if path else self._eval(func.value, frame)
        found: _Value = {}
        for method in self._methods[func.attr]:
            bound = self._bound(method, given, words, own=True)
            first = method.args.args[0].arg if isinstance(method, Function) and method.args.args else ""
            if first:
                bound[first] = {part: held for part, held in mine.items() if part}
            value, names = self._call(method, bound, frame)
            found = _merged(found, value)
            if first and path:
                for held, sources in names.items():
                    if _is_part(held, first):
                        self._set(path + held[len(first) :], {"": sources}, frame, weak=True)
        return found

    def _bound(
        self, function: ast.AST, given: Sequence[_Value], words: dict[str, _Value], *, own: bool
    ) -> dict[str, _Value]:
        """Returns what each parameter of a function is given."""
        assert isinstance(function, Function | ast.Lambda)
        names = [each.arg for each in (*function.args.posonlyargs, *function.args.args)]
        bound: dict[str, _Value] = {}
        for place, value in enumerate(given):
            at = place + own
            if at < len(names):
                bound[names[at]] = value
            elif function.args.vararg is not None and value:
                bound[function.args.vararg.arg] = _merged(bound.get(function.args.vararg.arg, {}), {"": _all(value)})
        for name, value in words.items():
            if name in names or any(name == each.arg for each in function.args.kwonlyargs):
                bound[name] = value
            elif function.args.kwarg is not None and value:
                bound[function.args.kwarg.arg] = _merged(
                    bound.get(function.args.kwarg.arg, {}), {f"[{name!r}]" if name != "**" else "": _all(value)}
                )
        return bound

    def _call(self, function: ast.AST, bound: dict[str, _Value], frame: _Frame) -> tuple[_Value, dict[str, _Sources]]:
        """Returns what a function returns, and what its names hold at its end."""
        names = {name + part: held for name, value in bound.items() for part, held in value.items()}
        key = (id(function), frozenset(names.items()), frame.control)
        if key in self._memo:
            return self._memo[key]
        self._calls += 1
        if id(function) in self._running or frame.depth >= _MAX_DEPTH or self._calls > _MAX_CALLS:
            return {}, {}
        self._running.add(id(function))
        inner = _Frame(function, dict(names), frame.control, depth=frame.depth + 1)
        if isinstance(function, ast.Lambda):
            inner.returned = self._eval(function.body, inner)
        elif isinstance(function, Function):
            self._block(function.body, inner)
        self._running.discard(id(function))
        self._memo[key] = inner.returned, inner.names
        return self._memo[key]


def _before(scope: ast.AST, loop: ast.AST) -> Iterator[ast.stmt]:
    """Yields the statements that give something to a name, of a script or a function, above a loop."""
    for statement in getattr(scope, "body", ()):
        if any(node is loop for node in ast.walk(statement)):
            return
        calls = [last_name(node.func) for node in ast.walk(statement) if isinstance(node, ast.Call)]
        if isinstance(statement, ast.Assign | ast.AnnAssign) and all(name in _PLAIN for name in calls):
            yield statement


def _may_be_own(whole: str) -> bool:
    """Tell whether a function of this whole name may be one of the script's own modules."""
    return bool(whole) and whole.partition(".")[0] not in _LIBRARIES


def _leaves(node: ast.If) -> bool:
    return any(
        isinstance(block[-1], ast.Return | ast.Continue | ast.Break | ast.Raise)
        for block in (node.body, node.orelse)
        if block
    )


def _path(node: ast.AST) -> str:
    """Returns `a.b['c']` of what is written so; empty if it is something else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = _path(node.value)
        return f"{base}.{node.attr}" if base else ""
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        base = _path(node.value)
        return f"{base}[{node.slice.value!r}]" if base else ""
    return ""


def _root(path: str) -> str:
    return path.replace("[", ".").partition(".")[0]


def _is_part(path: str, of: str) -> bool:
    return path.startswith(of) and path[len(of) : len(of) + 1] in (".", "[")


def _all(value: _Value) -> _Sources:
    return _NONE.union(*value.values())


def _part(value: _Value, name: str) -> _Value:
    """Returns what a part of a value holds."""
    found: _Value = {}
    for part, sources in value.items():
        if not part or part == name:
            _add(found, "", sources)
        elif _is_part(part, name):
            _add(found, part[len(name) :], sources)
    return found


def _plain(value: _Value) -> _Sources:
    """Returns what a value is made of; not what lies in it under a name: who takes a part of it mostly takes another."""
    return _NONE.union(
        *(sources for part, sources in value.items() if not part or (part[0] == "[" and part[1] not in "'\""))
    )


def _merged(one: _Value, other: _Value) -> _Value:
    found = dict(one)
    for part, sources in other.items():
        _add(found, part, sources)
    return found


def _add(found: dict[str, _Sources], part: str, sources: _Sources) -> None:
    if sources:
        found[part] = found.get(part, _NONE) | sources


def _without_files(sources: _Sources) -> _Sources:
    return frozenset(source for source in sources if not source.is_file)
