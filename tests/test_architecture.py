"""The shape of the house, as tests: layers, absences, budgets, frozen lists.

Everything is read from the source (by syntax tree) or asked of a fresh interpreter, so nothing here depends on what
another test imported. A failing test names the file and line; a rule changes here only together with its reason in
ARCHITECTURE.md.
"""

from __future__ import annotations

import ast
import functools
import re
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "holdfast"

# From the ground up. A file may import its own room and the rooms before it, nothing else of ours.
ROOMS = ("base", "core", "tiers", "keeper", "checkpoint", "elastic", "adapters", "testing", "cli")
WITHOUT_TORCH = ("base", "core", "tiers", "keeper", "cli")
# What is below it in the order and yet not for it: commands start these as programs, so that looking stays quick.
NOT_FOR_CLI = ("checkpoint", "elastic", "adapters", "testing")
MAX_FILES_IN_A_FOLDER = 14

pytestmark = pytest.mark.usefixtures("without_collector")

PUBLIC_NAMES = [
    "Checkpointer",
    "Config",
    "HoldfastError",
    "Level",
    "RestoreReport",
    "SaveHandle",
    "Version",
    "resumable",
]

MAX_FUNCTION_LINES = 80
MAX_P90_FUNCTION_LINES = 35
MEDIAN_FUNCTION_LINES = 10
MAX_PARAMETERS = 7
# The public constructor takes what the user owns by keyword, one name each; a record would be more to type there.
# Of a command every option is a parameter.
MANY_PARAMETERS = {"checkpoint/checkpointer/checkpointer.py: Checkpointer.__init__", "cli/cli.py: plan"}

# The public door; a format that a user asks for; variables and a launcher that another framework's jobs bring; a folder in a stack.
MAY_NAME_FRAMEWORKS = {
    "__init__.py", "cli/cli.py", "cli/stored/export.py", "base/config.py", "elastic/launch/foreign_launcher_env.py",
    "elastic/watchdog/stack_dump.py",
}  # fmt: skip

MAX_PUBLIC_METHODS = 20
MANY_PUBLIC_METHODS = {
    "testing/device/torch_sim.py: DeviceModule": "PyTorch asks a device's module for each of these names",
}

# What only tests give: a clock of theirs, in the place of a device's.
FOR_TESTS_ALONE = {"checkpoint/pipeline/timers.py: DeviceClock.__init__ event"}

FORBIDDEN_IN_CORE = {
    "asyncio", "datetime", "io", "logging", "multiprocessing", "os", "pathlib", "queue", "random", "secrets", "select",
    "shutil", "signal", "socket", "subprocess", "sys", "tempfile", "threading", "time", "uuid",
}  # fmt: skip
EXECUTES_BYTES = {"cloudpickle", "code", "dill", "marshal", "pickle", "shelve", "yaml"}
# The environment is read in one place; the launcher writes it for its workers, the starter for the keeper.
# agree.py asks how many ranks torchrun started, so that a forgotten process group is told, not guessed.
# rehearsal.py tells each of its ranks which one it is, as a launcher would.
# The agent makes what a worker finds, the stage puts it there for every run of the script, the runner for a function.
# torch_environment.py compares it with what torch has read, where a script imports torch.
MAY_TOUCH_ENVIRONMENT = {
    "base/config.py", "elastic/launch/run_command.py", "elastic/launch/run_flags.py", "checkpoint/job/collectives.py", "checkpoint/dry_run.py", "keeper/rpc/spawn.py",
    "elastic/launch/agent.py", "elastic/launch/worker_assignment.py", "elastic/worker/script_sandbox.py", "elastic/worker/worker_main.py",
    "elastic/worker/torch_environment.py",
}  # fmt: skip

# Where what a signal's handler raises has to come through: what saves, restores and ends a run, in the thread of the script.
KEEPS_HANDLERS_ERRORS = ("base/", "tiers/", "checkpoint/", "keeper/rpc/", "adapters/")
# Of the start of a program, of the keeper or of another command.
BESIDE_A_RUN = {
    "adapters/exported.py", "base/config.py", "base/standard_streams.py", "checkpoint/dry_run.py", "checkpoint/pipeline/schedule_actions.py",
    "keeper/rpc/listener.py", "keeper/rpc/server.py", "keeper/rpc/thread_pool.py", "tiers/memory/page_populate.py",
}  # fmt: skip
# What handlers raise by custom, and the classes above.
RAISED_BY_HANDLERS = {
    "BaseException", "Exception", "OSError", "REFUSALS", "RuntimeError", "SystemExit", "KeyboardInterrupt", "TimeoutError", "ValueError", "LevelNotReached", "KeeperLost",
}  # fmt: skip
# They ask memory, and nothing that takes time.
TAKES_NO_TIME = {"binary", "bool", "dict", "float", "int", "list", "remove", "repr", "str", "type"}
OF_A_THREAD, OF_THE_KEEPER = "another thread, where no handler runs", "the keeper's"
ASKS_NO_HANDLER = {
    "adapters/native_tree.py: NativeWriter._run": OF_A_THREAD,
    "adapters/zero_lines/nested/nested_loop.py: KeptLoops._begin": "asked once the other ranks know",
    "checkpoint/capture/optimizer_fence.py: Fence._run": OF_A_THREAD,
    "checkpoint/job/collectives.py: _attempt": "`together` asks, once the other ranks know",
    "checkpoint/job/keeper_link.py: KeeperLink._mend": OF_A_THREAD,
    "checkpoint/job/slot_reservation.py: Reservation.run": OF_A_THREAD,
    "checkpoint/job/slot_reservation.py: Reservation.widen": OF_A_THREAD,
    "checkpoint/save/durable_tracker.py: DurableTracker._tell": OF_A_THREAD,
    "checkpoint/save/extra_places.py: ExtraPlaces._copy": OF_A_THREAD,
    "checkpoint/usage/replay_check.py: SelfCheck.begin": "a child of the script's that ends there",
    "keeper/rpc/caller.py: Caller._read": OF_A_THREAD,
    "keeper/rpc/spawn.py: _lock_within.wait": OF_A_THREAD,
    "tiers/backends/parallel_streams.py: Streams._do": "whoever waits for it raises it",
    "tiers/backends/parallel_streams.py: Streams._join": "it is raised behind the loop",
    "tiers/storage/read_limit.py: ReadLimit.run.do": "whoever waits for it raises it",
    "tiers/wire/frames.py: accept": OF_THE_KEEPER,
    "tiers/wire/tcp.py: listen": OF_THE_KEEPER,
    "tiers/wire/tcp.py: take": OF_THE_KEEPER,
}


@dataclass(frozen=True)
class Import:
    """One import statement: which module, at which line, inside a function or not."""

    target: str
    line: int
    in_function: bool


@functools.cache
def files() -> tuple[Path, ...]:
    return tuple(sorted(SOURCE.rglob("*.py")))


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def modules() -> frozenset[str]:
    return frozenset(map(module_name, files()))


def label(path: Path) -> str:
    return str(path.relative_to(SOURCE))


def room(path: Path) -> str:
    """The room of a file; empty for the package root."""
    parts = path.relative_to(SOURCE).parts
    return parts[0] if len(parts) > 1 else ""


@functools.cache
def imports(path: Path) -> tuple[Import, ...]:
    return tuple(_imports(path, tree(path), in_function=False))


def _imports(path: Path, node: ast.AST, *, in_function: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (Import(alias.name, child.lineno, in_function) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            base = _absolute(path, child)
            for alias in child.names:
                full = f"{base}.{alias.name}"
                yield Import(full if full in modules() else base, child.lineno, in_function)
        inner = in_function or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        yield from _imports(path, child, in_function=inner)


def _absolute(path: Path, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    package = path.relative_to(SOURCE.parent).parts[: -node.level]
    return ".".join([*package, *([node.module] if node.module else [])])


def is_ours(target: str) -> bool:
    return target == "holdfast" or target.startswith("holdfast.")


@functools.cache
def functions(path: Path) -> tuple[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef], ...]:
    """Every function with its name inside the file."""
    return tuple(_functions(tree(path), ""))


def _functions(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + child.name, child
            yield from _functions(child, f"{prefix}{child.name}.")
        elif isinstance(child, ast.ClassDef):
            yield from _functions(child, f"{prefix}{child.name}.")
        else:
            yield from _functions(child, prefix)


def num_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (function.end_lineno or function.lineno) - function.lineno + 1


@functools.cache
def calls(path: Path) -> tuple[tuple[str, ast.Call], ...]:
    """Every call with the dotted name that is called, as written."""
    return tuple((ast.unparse(node.func), node) for node in ast.walk(tree(path)) if isinstance(node, ast.Call))


def in_fresh_interpreter(code: str) -> str:
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert answer.returncode == 0, answer.stderr
    return answer.stdout


def test_every_file_is_in_a_known_room() -> None:
    assert {room(path) for path in files()} <= {"", *ROOMS}


def test_imports_point_down_only() -> None:
    wrong = []
    for path in files():
        here = room(path)
        if not here:
            continue  # the public door names what is above it; it loads nothing, see test_public_names_are_loaded_lazily
        allowed = set(ROOMS[: ROOMS.index(here) + 1]) - (set(NOT_FOR_CLI) if here == "cli" else set())
        for found in imports(path):
            parts = found.target.split(".")
            if is_ours(found.target) and len(parts) > 1 and parts[1] not in allowed:
                wrong.append(f"{label(path)}:{found.line} imports {found.target}")
    assert not wrong, "\n".join(wrong)


def test_no_import_cycle_even_inside_functions() -> None:
    others = modules() - {"holdfast"}
    edges = {
        module_name(path): {i.target for i in imports(path)} & others - {module_name(path)}
        for path in files()
        if module_name(path) in others
    }
    assert not _in_cycles(edges), f"these import each other: {_in_cycles(edges)}"


def test_no_file_name_stands_twice() -> None:
    """But for a file of `core` and the one that carries out what it decides."""
    places: dict[str, list[str]] = {}
    for path in files():
        if not path.name.startswith("__"):
            places.setdefault(path.name, []).append(room(path))
    carried_out = [["core", "keeper"], ["checkpoint", "core"], ["core", "elastic"]]
    assert {name: rooms for name, rooms in places.items() if len(rooms) > 1 and sorted(rooms) not in carried_out} == {}


def test_names_of_frameworks_stand_in_adapters() -> None:
    """`accelerate` and `ray` are words of every day, and not looked for."""
    names = re.compile(
        r"mindspore|aiturbo|deepspeed|megatron|lightning|torchtitan|torch_checkpointing|hugging.?face", re.IGNORECASE
    )
    found = {label(path) for path in files() if room(path) != "adapters" and names.search(path.read_text())}
    assert found == MAY_NAME_FRAMEWORKS


def test_what_must_never_happen_is_held_by_tests_that_exist() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    section = text.partition("## What must never happen")[2].partition("\n## ")[0]
    rows = section.partition("|---|---|\n")[2].strip().splitlines()
    assert len(rows) > 20
    assert [row for row in rows if not named_tests(row)] == []
    assert missing_tests(section) == []


def test_no_two_folders_import_each_other() -> None:
    """A folder of a room is one box, and so is each file that stands in a room itself."""
    edges: dict[str, set[str]] = {}
    for path in filter(room, files()):
        inner = {_box(i.target) for i in imports(path) if is_ours(i.target)}
        edges.setdefault(_box(module_name(path)), set()).update(inner - {""})
    assert not _in_cycles(edges), f"these import each other: {_in_cycles(edges)}"


def test_no_folder_holds_more_than_one_can_look_over() -> None:
    held = Counter(label(path.parent) for path in files())
    assert not {folder: count for folder, count in held.items() if count > MAX_FILES_IN_A_FOLDER}


def _box(module: str) -> str:
    """The folder of a module in its room, such as `tiers.format.image`; a file that stands in the room itself is its own."""
    return ".".join(module.split(".")[1:3])


def _in_cycles(edges: dict[str, set[str]]) -> list[str]:
    """What is part of a cycle or leads into one."""
    edges = {name: targets - {name} for name, targets in edges.items()}
    while True:  # whatever imports nothing that is left cannot be part of a cycle
        free = {name for name, targets in edges.items() if not targets & set(edges)}
        if not free:
            return sorted(edges)
        edges = {name: targets for name, targets in edges.items() if name not in free}


def test_no_own_import_inside_a_function() -> None:
    wrong = [
        f"{label(path)}:{found.line} {found.target}"
        for path in files()
        for found in imports(path)
        if found.in_function and is_ours(found.target)
    ]
    assert not wrong, "\n".join(wrong)


def test_only_the_public_door_imports_by_name() -> None:
    wrong = [
        f"{label(path)}:{call.lineno} {name}"
        for path in files()
        if room(path)
        for name, call in calls(path)
        if name in {"importlib.import_module", "import_module", "__import__"}
    ]
    assert not wrong, "\n".join(wrong)


def test_core_is_pure() -> None:
    wrong = []
    for path in files():
        if room(path) != "core":
            continue
        for found in imports(path):
            top = found.target.split(".")[0]
            if not is_ours(found.target) and (top not in sys.stdlib_module_names or top in FORBIDDEN_IN_CORE):
                wrong.append(f"{label(path)}:{found.line} imports {found.target}")
        wrong += [f"{label(path)}:{c.lineno} calls {n}" for n, c in calls(path) if n in {"open", "print", "input"}]
    assert not wrong, "\n".join(wrong)


def test_what_a_rule_can_be_told_is_told_by_the_product() -> None:
    """A rule whose evidence no caller brings is proved by simulation and never holds."""
    told = {(called, word) for path in files() if room(path) != "testing" for called, word in _words(path)}
    wrong = []
    for path in files():
        for name, function in (
            functions(path) if room(path) in {"core", "tiers", "keeper", "checkpoint", "elastic"} else ()
        ):
            called = name.split(".")[-2 if name.endswith("__init__") else -1]
            for place, parameter in _optional(function):
                where = f"{label(path)}: {name} {parameter}"
                if name.split(".")[0] in PUBLIC_NAMES:  # users bring it
                    continue
                if not {(called, parameter), (called, place), (called, "*")} & told and where not in FOR_TESTS_ALONE:
                    wrong.append(where)
    assert not wrong, "\n".join(wrong)


def _words(path: Path) -> Iterator[tuple[str, str | int]]:
    """The names, and for what has none the places, of what each call in a file gives."""
    for name, call in calls(path):
        called = name.rsplit(".", 1)[-1]
        for word in call.keywords:
            yield called, word.arg or "*"
        for place, given in enumerate(call.args):
            yield called, "*" if isinstance(given, ast.Starred) else place


def _optional(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[tuple[int, str]]:
    """Place and name of each parameter without which a function goes by nothing: its default is empty or no."""
    known = function.args
    by_place = [p.arg for p in (*known.posonlyargs, *known.args) if p.arg not in {"self", "cls"}]
    defaults = dict(zip(reversed(by_place), reversed(known.defaults), strict=False))
    defaults |= {p.arg: value for p, value in zip(known.kwonlyargs, known.kw_defaults, strict=True) if value}
    for name, value in defaults.items():
        if not name.startswith("_") and ast.unparse(value) in {"None", "False", "()", "''", "0"}:
            yield by_place.index(name) if name in by_place else -1, name


def test_no_torch_below_the_trainer() -> None:
    wrong = [
        f"{label(path)}:{found.line}"
        for path in files()
        if room(path) in {"", *WITHOUT_TORCH}
        for found in imports(path)
        if found.target.split(".")[0] == "torch"
    ]
    assert not wrong, "\n".join(wrong)


def test_importing_everything_below_the_trainer_loads_neither_torch_nor_numpy() -> None:
    names = [module_name(path) for path in files() if room(path) in {"", *WITHOUT_TORCH} and path.name != "__main__.py"]
    code = "import sys\n" + "".join(f"import {name}\n" for name in names)
    loaded = in_fresh_interpreter(code + "print(*[m for m in ('torch', 'numpy') if m in sys.modules])").split()
    assert loaded == []


def test_a_keeper_loads_no_package_before_it_needs_it() -> None:
    """Of encrypted files and of TOML: each job starts a keeper on every node, most without any of them."""
    optional = ("cryptography", "tomllib", "tomli", "torch", "numpy", "safetensors")
    code = f"import sys, holdfast.keeper.service.keeper_main; print(*[m for m in {optional} if m in sys.modules])"
    assert in_fresh_interpreter(code).split() == []


def test_public_names_are_frozen() -> None:
    code = "import holdfast; print(*holdfast.__all__)"
    assert in_fresh_interpreter(code).split() == PUBLIC_NAMES
    assert len(PUBLIC_NAMES) < 10


def test_public_names_are_loaded_lazily() -> None:
    code = "import holdfast, sys; print(*[m for m in sys.modules if m.startswith('holdfast.')])"
    assert in_fresh_interpreter(code).split() == []


def test_public_names_exist_and_the_checkpointer_is_one_class_whose_help_is_whole() -> None:
    """A user of plain PyTorch loads no adapter with it."""
    code = """
import holdfast, inspect, sys
from holdfast import Checkpointer
print(Checkpointer.__mro__[1:] == (object,))
print(*[name for name, value in inspect.getmembers(Checkpointer) if name[0] != "_" and not value.__doc__])
print(*[name for name in sys.modules if name.startswith("holdfast.adapters")])
print(*[getattr(holdfast, name).__name__ for name in holdfast.__all__])
"""
    assert in_fresh_interpreter(code).splitlines() == ["True", "", "", " ".join(PUBLIC_NAMES)]


def test_no_print_outside_the_commands() -> None:
    wrong = [
        f"{label(path)}:{call.lineno}"
        for path in files()
        if room(path) != "cli"
        for name, call in calls(path)
        if name == "print"
    ]
    assert not wrong, "\n".join(wrong)


def test_nothing_executes_bytes() -> None:
    wrong = []
    for path in files():
        wrong += [f"{label(path)}:{i.line} {i.target}" for i in imports(path) if i.target in EXECUTES_BYTES]
        wrong += [f"{label(path)}:{c.lineno} {n}" for n, c in calls(path) if n in {"eval", "exec", "torch.load"}]
    assert not wrong, "\n".join(wrong)


def test_the_environment_is_read_in_one_place() -> None:
    wrong = [
        f"{label(path)}:{node.lineno}"
        for path in files()
        if label(path) not in MAY_TOUCH_ENVIRONMENT and room(path) != "testing"
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Attribute) and ast.unparse(node) in {"os.environ", "os.getenv", "os.putenv"}
    ]
    assert not wrong, "\n".join(wrong)


def test_every_file_opens_with_its_map() -> None:
    wrong = []
    for path in files():
        if not ast.get_docstring(tree(path)):
            wrong.append(f"{label(path)} has no docstring at its top")
        if path.name != "__init__.py" and "from __future__ import annotations" not in path.read_text(encoding="utf-8"):
            wrong.append(f"{label(path)} lacks `from __future__ import annotations`")
    assert not wrong, "\n".join(wrong)


CONSTRUCTORS = {
    "empty",
    "zeros",
    "ones",
    "full",
    "tensor",
    "arange",
    "empty_strided",
    "rand",
    "randn",
    "eye",
    "linspace",
}


def test_every_tensor_is_made_on_a_device_that_is_named() -> None:
    """A script may set another default device; what is ours would go there, too."""
    calls = [(path, node) for path in files() for node in ast.walk(tree(path)) if isinstance(node, ast.Call)]
    made = [(path, call) for path, call in calls if ast.unparse(call.func).removeprefix("torch.") in CONSTRUCTORS]
    made = [(path, call) for path, call in made if ast.unparse(call.func).startswith("torch.")]
    assert len(made) > 20, "nothing was looked at"
    assert not [
        f"{label(path)}:{call.lineno}" for path, call in made
        if room(path) != "testing" and not any(keyword.arg in ("device", None) for keyword in call.keywords)
    ]  # fmt: skip


def test_functions_stay_small() -> None:
    found = [(num_lines(f), f"{label(path)}: {name}", f) for path in files() for name, f in functions(path)]
    lengths = sorted(length for length, _, _ in found)
    too_long = [f"{where} has {length} lines" for length, where, _ in found if length > MAX_FUNCTION_LINES]
    assert not too_long, "\n".join(too_long)
    assert statistics.median(lengths) < MEDIAN_FUNCTION_LINES
    assert lengths[len(lengths) * 9 // 10] < MAX_P90_FUNCTION_LINES


def test_classes_have_few_public_methods() -> None:
    counts = {
        f"{label(path)}: {node.name}": len(
            {
                inner.name
                for inner in node.body
                if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef) and not inner.name.startswith("_")
            }
        )
        for path in files()
        for node in ast.walk(tree(path))
        if isinstance(node, ast.ClassDef)
    }
    assert {name for name, count in counts.items() if count > MAX_PUBLIC_METHODS} == set(MANY_PUBLIC_METHODS)


def test_functions_take_few_parameters() -> None:
    wrong = []
    for path in files():
        for name, function in functions(path):
            arguments = [a.arg for a in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)]
            count = len([a for a in arguments if a not in {"self", "cls"}])
            if count > MAX_PARAMETERS and f"{label(path)}: {name}" not in MANY_PARAMETERS:
                wrong.append(f"{label(path)}: {name} takes {count}")
    assert not wrong, "\n".join(wrong)


def test_public_methods_of_some_length_say_what_they_do() -> None:
    wrong = []
    for path in files():
        for name, function in functions(path):
            private = any(part.startswith("_") or part == "forward" for part in name.split("."))
            nested = any(name.startswith(f"{outer}.") for outer, _ in functions(path))
            if not private and not nested and num_lines(function) > 4 and not ast.get_docstring(function):
                wrong.append(f"{label(path)}:{function.lineno} {name}")
    assert not wrong, "\n".join(wrong)


def test_a_broad_except_records_the_fault_or_says_why() -> None:
    wrong = []
    for path in files():
        lines = path.read_text(encoding="utf-8").splitlines()
        for node in ast.walk(tree(path)):
            if not isinstance(node, ast.ExceptHandler):
                continue
            caught = ast.unparse(node.type) if node.type else "BaseException"
            passes_on = isinstance(node.body[-1], ast.Raise) and node.body[-1].exc is None
            records = any(line.startswith("logger.exception(") for line in ast.unparse(node).split("    "))
            if re.search(r"\b(Exception|BaseException)\b", caught) and not passes_on and not records:
                nearby = lines[node.lineno - 2 : node.lineno + 1]
                if not any(re.search(r"#(?! noqa: [A-Z0-9]+\s*$)", line) for line in nearby):
                    wrong.append(f"{label(path)}:{node.lineno} catches {caught} and gives no reason")
    assert not wrong, "\n".join(wrong)


def test_bases_take_a_parameter_in_python_3_10_too() -> None:
    """What a base class is given in brackets is asked for when the module is loaded, and no type checker runs there."""
    wrong = [
        f"{label(path)}:{base.lineno} {ast.unparse(base)}"
        for path in files()
        for node in ast.walk(tree(path))
        for base in (node.bases if isinstance(node, ast.ClassDef) else [])
        if isinstance(base, ast.Subscript) and ast.unparse(base.value) not in {"Generic", "Protocol"}
    ]
    assert not wrong, "\n".join(wrong)


def test_programs_are_started_without_the_working_directory_in_their_path() -> None:
    """`python -m` looks there first, and others may write there. The yardstick of plain torchrun is torch's own program."""
    wrong = [
        f"{label(path)}:{node.lineno} {ast.unparse(node)}: call base.program.command"
        for path in files()
        if label(path) != "base/program.py"
        for node in ast.walk(tree(path))
        if isinstance(node, ast.List)
        and {"sys.executable", "'-m'"} <= (words := {ast.unparse(word) for word in node.elts})
        and "'torch.distributed.run'" not in words
    ]
    assert not wrong, "\n".join(wrong)


def test_no_finaliser() -> None:
    wrong = [f"{label(path)}: {name}" for path in files() for name, _ in functions(path) if name.endswith("__del__")]
    assert not wrong, "\n".join(wrong)


def test_the_package_asks_for_what_it_says_and_its_tests_for_no_less() -> None:
    """Any torch from 2.10 on; one pinned only for development; strict types, and no warning that is only shown."""
    if sys.version_info < (3, 11):
        pytest.skip("tomllib comes with Python 3.11")
    import tomllib

    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    project, tools = settings["project"], settings["tool"]
    assert [needed for needed in project["dependencies"] if needed.startswith("torch")] == ["torch>=2.10"]
    assert project["requires-python"] == ">=3.10"
    only_for_tests = re.compile(r"(prometheus|psutil|rich|pytest|hypothesis)")
    assert not [needed for needed in project["dependencies"] if only_for_tests.match(needed)]
    assert project["scripts"] == {"holdfast": "holdfast.cli.cli:main"}
    assert "ext-modules" not in tools["setuptools"], "pure Python"
    assert re.search(r"^torch==", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    assert tools["mypy"]["strict"] is True
    assert tools["pytest"]["ini_options"]["filterwarnings"] == ["error"]


def test_the_wheel_has_what_proves_an_installation_and_nothing_that_only_tests_need() -> None:
    code = """
from setuptools import Distribution
found = Distribution({"script_name": "setup.py"})
found.parse_config_files(["pyproject.toml"])
build = found.get_command_obj("build_py")
build.ensure_finalized()
print(*build.get_outputs(include_bytecode=False), sep="\\n")
"""
    names = [name.partition("build/lib/")[2] for name in in_fresh_interpreter(code).splitlines()]
    assert {label(path) for path in files()} == {n.removeprefix("holdfast/") for n in names if n.endswith(".py")}
    assert [name for name in names if re.search(r"planted|bugs|model_check|test_|_kit|conftest", name)] == []
    needed = {
        "demo/demo.py",
        "contracts/backend.py",
        "drill/crash_drill.py",
        "simulator/__main__.py",
        "device/native/all.cpp",
    }
    assert {f"holdfast/testing/{name}" for name in needed} <= set(names)


def project_files() -> Iterator[Path]:
    """Every file of the project that is under version control or will be."""
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    if listing.returncode != 0:
        pytest.skip("not a git checkout")
    for name in listing.stdout.splitlines():
        if (ROOT / name).is_file():
            yield ROOT / name


def project_texts() -> Iterator[Path]:
    """Those of them that a person wrote."""
    return (path for path in project_files() if path.suffix in {".py", ".md", ".toml", ".txt", ".cfg", ""})


def test_the_repository_stays_small() -> None:
    large = {str(path.relative_to(ROOT)): size for path in project_files() if (size := path.stat().st_size) > 256 << 10}
    assert not large, f"larger than 256 KiB, make it when it is needed: {large}"


def test_no_file_names_the_machine_it_was_written_on() -> None:
    # Put together from parts, so that this file does not find itself.
    places = "|".join(["/" + "work" + "/(main|shared)", "/" + "root/", "work" + "place", "/home/" + r"\w+/"])
    notes = "|".join(["TO" + "DO", "FIX" + "ME", r"\b[Hh]elper [A-E]\d?\b"])
    pattern = re.compile(f"({places})|({notes})")
    wrong = [
        f"{path.relative_to(ROOT)}:{number} {line.strip()[:80]}"
        for path in project_texts()
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1)
        if pattern.search(line)
    ]
    assert not wrong, "\n".join(wrong)


def test_who_goes_on_without_an_error_asks_whether_a_signals_handler_raised_it() -> None:
    """By `pass_on` or `forgive`. Not asked: who raises the error again, what takes no time, and threads without handlers."""
    open_ones, quiet = [], set()
    for path in files():
        if label(path).startswith(KEEPS_HANDLERS_ERRORS) and label(path) not in BESIDE_A_RUN:
            for function, line in swallowed(path):
                name = f"{label(path)}: {function}"
                quiet.add(name)
                if name not in ASKS_NO_HANDLER:
                    open_ones.append(f"{name}, line {line}")
            # It passes a ValueError over.
            open_ones += [f"{label(path)}: {name}" for name, _ in calls(path) if name.endswith(".is_relative_to")]
    assert not open_ones, "\n".join(open_ones)
    assert not ASKS_NO_HANDLER.keys() - quiet, "these have nothing to excuse"


def swallowed(path: Path) -> Iterator[tuple[str, int]]:
    """Where errors as handlers raise them are made into others, or passed over: function and line."""
    for name, function in functions(path):
        for node in _of_function(function):
            if isinstance(node, ast.Try) and not _takes_no_time(node.body):
                yield from ((name, each.lineno) for each in node.handlers if _names(each.type) and not _is_told(each))
            elif isinstance(node, ast.With) and not _takes_no_time(node.body):
                calls = [each.context_expr for each in node.items if isinstance(each.context_expr, ast.Call)]
                yield from (
                    (name, node.lineno) for call in calls if called(call) == "suppress" and any(map(_names, call.args))
                )


def _of_function(function: ast.AST) -> Iterator[ast.AST]:
    """Its nodes without those of functions in it."""
    for child in ast.iter_child_nodes(function):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield child
            yield from _of_function(child)


def _names(kind: ast.expr | None) -> bool:
    """Whether a class is named that handlers raise; nothing names all."""
    return kind is None or any(isinstance(each, ast.Name) and each.id in RAISED_BY_HANDLERS for each in ast.walk(kind))


def _takes_no_time(body: list[ast.stmt]) -> bool:
    calls = {called(each) for statement in body for each in ast.walk(statement) if isinstance(each, ast.Call)}
    loops = any(isinstance(each, ast.For | ast.While) for statement in body for each in ast.walk(statement))
    return not loops and calls <= TAKES_NO_TIME


def _is_told(handler: ast.ExceptHandler) -> bool:
    """Whether an `except` raises its error again, all but what it asks for, or hands it to who raises a handler's."""
    raised = [each for each in ast.walk(handler) if isinstance(each, ast.Raise)]
    if any(each.exc is None or (isinstance(each.exc, ast.Name) and each.exc.id == handler.name) for each in raised):
        return True
    calls = {called(each) for each in ast.walk(handler) if isinstance(each, ast.Call)}
    return not calls.isdisjoint(_tellers())


def called(call: ast.Call) -> str:
    """The last part of the name that is called."""
    return ast.unparse(call.func).rsplit(".", 1)[-1]


@functools.cache
def _tellers() -> frozenset[str]:
    """`pass_on`, and what calls it with an error that it is given."""
    found = {"pass_on", "of_a_handler"}
    for path in files():
        for name, function in functions(path):
            given = {each.arg for each in function.args.args}
            for each in ast.walk(function):
                if (
                    isinstance(each, ast.Call)
                    and called(each) == "pass_on"
                    and given & set(map(ast.unparse, each.args))
                ):
                    found.add(name.rsplit(".", 1)[-1])
    return frozenset(found)


def test_promises_name_tests_that_exist() -> None:
    text = (ROOT / "docs" / "promises.md").read_text(encoding="utf-8")
    assert named_tests(text), "docs/promises.md names no test at all"
    assert not missing_tests(text)


def named_tests(text: str) -> list[tuple[str, str]]:
    """The files of tests that a text names, and which test of them."""
    return re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", text)


def missing_tests(text: str) -> list[str]:
    wrong = []
    for file, name in named_tests(text):
        path = ROOT / file
        if not path.is_file():
            wrong.append(f"{file} does not exist")
        elif name and name not in {f.rsplit(".")[-1] for f, _ in functions(path)}:
            wrong.append(f"{file} has no test {name}")
    return wrong


def test_promises_cover_every_requirement_once() -> None:
    text = (ROOT / "docs" / "promises.md").read_text(encoding="utf-8")
    numbers = [int(number) for number in re.findall(r"^### (\d+)\. ", text, flags=re.MULTILINE)]
    assert sorted(numbers) == list(range(1, 92))


@pytest.mark.parametrize(("name", "most"), [("README.md", 121), ("ARCHITECTURE.md", 220)])
def test_the_first_pages_stay_short(name: str, most: int) -> None:
    assert len((ROOT / name).read_text(encoding="utf-8").splitlines()) < most


def test_no_test_file_imports_from_another_one() -> None:
    """What several of them need stands in `tests/kit/`, in a kit or in a `conftest.py`."""
    found = [
        f"{path.relative_to(ROOT)}:{imported.line}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for imported in _imports(path, tree(path), in_function=False)
        if any(part.startswith("test_") for part in imported.target.split("."))
    ]
    assert not found
