"""Which module of the user's own has the loop that trains: exactly one, in a function, and nobody has to guess."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.adapters.zero_lines.nested.nested_script import Nest
from holdfast.adapters.zero_lines.nested.texts_of_start import are_alike
from holdfast.adapters.zero_lines.own_modules import OwnFinder, find_in_modules, find_in_script
from holdfast.adapters.zero_lines.script_text import HOOK
from holdfast.checkpoint.usage.clock_names import names_of_start

LOOP = "def train(batches, model, optimizer):\n    for x in batches:\n        model(x).backward()\n        optimizer.step()\n"


def found(home: Path, source: str, **files: str) -> str | None:
    for name, text in files.items():
        path = home / f"{name.replace('__in__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    loops = find_in_modules(str(home / "main.py"), source)
    return loops.name if loops is not None else None


def test_the_loop_of_a_module_beside_the_script_is_found(tmp_path: Path) -> None:
    assert found(tmp_path, "from own_trainer import train", own_trainer=LOOP) == "own_trainer"


@pytest.mark.parametrize("begin", [b"\xef\xbb\xbf# \xc3\xa9\n", b"# coding: latin-1\n# \xe9\n"], ids=["mark", "coding"])
def test_a_module_is_read_as_python_reads_it(begin: bytes, tmp_path: Path) -> None:
    (tmp_path / "own_trainer.py").write_bytes(begin + LOOP.encode())
    assert found(tmp_path, "from own_trainer import train") == "own_trainer"


def test_it_is_found_through_other_modules_and_packages(tmp_path: Path) -> None:
    files = {
        "own_runner": "import own_pack.engine", "own_pack__in____init__": "from .deep import train",
        "own_pack__in__engine": "from . import deep\nfrom own_pack.deep import train", "own_pack__in__deep": LOOP,
    }  # fmt: skip
    assert found(tmp_path, "def main():\n    import own_runner", **files) == "own_pack.deep"


@pytest.mark.parametrize(
    "files",
    [
        pytest.param({"own_a": LOOP, "own_b": LOOP}, id="two modules train"),
        pytest.param({"own_a": LOOP, "own_b": "import holdfast"}, id="one uses holdfast"),
        pytest.param(
            {"own_a": LOOP.replace("def train(batches, model, optimizer):", "if True:")}, id="it runs at the import"
        ),
        pytest.param({"own_a": LOOP + "    else:\n        pass\n"}, id="a loop with an else"),
        pytest.param({"own_a": "def train(:"}, id="no Python"),
        pytest.param({"own_c": LOOP}, id="it is not imported"),
    ],
)
def test_nothing_is_found_where(files: dict[str, str], tmp_path: Path) -> None:
    assert found(tmp_path, "import own_a, own_b", **files) is None


def test_a_module_of_python_or_one_that_is_loaded_is_not_taken_for_the_scripts(tmp_path: Path) -> None:
    assert found(tmp_path, "import queue, pytest", queue=LOOP, pytest=LOOP) is None


@pytest.mark.parametrize(
    ("place", "beside", "expected"),
    [
        ("repo", "", "own_package.engine"),
        ("site-packages", "", None),
        ("repo", LOOP, "own_beside"),  # then the others are not looked at
    ],
)
def test_a_package_that_is_not_installed_is_the_users_own(
    place: str, beside: str, expected: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / place / "own_package"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "engine.py").write_text(LOOP)
    monkeypatch.syspath_prepend(str(package.parent))
    source = "import own_beside\nfrom own_package.engine import train"
    assert found(tmp_path / "scripts", source, own_beside=beside) == expected


def test_a_package_that_an_installed_one_of_its_name_comes_before_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in ("repo", "site-packages"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "own_trainer.py").write_text(LOOP)
        monkeypatch.syspath_prepend(str(tmp_path / place))
    assert found(tmp_path / "scripts", "import own_trainer") is None


def test_names_of_the_start_are_found_across_own_modules(tmp_path: Path) -> None:
    (tmp_path / "conf.py").write_text(
        "from datetime import datetime\nNOW = datetime.now().strftime('%d')\nOTHER = 'a'\n"
    )
    script = (
        "import conf, uuid\nfrom torch.optim import SGD\nclass Log:\n    def __init__(self, at): self.place = at\n"
        "path = 'runs/' + conf.NOW\nlog, args.uid = Log(path), uuid.uuid4().hex\nother = conf.OTHER\n"
        "for step in range(3):\n    loss.backward()\n    optimizer.step()\n"
    )
    nest = find_in_script(str(tmp_path / "train.py"), script)
    assert isinstance(nest, Nest)
    found = nest.started
    assert {"NOW", "path", "place", "uid"} <= found
    assert not {"other", "OTHER", "step", "loss"} & found


@pytest.mark.parametrize(
    ("saved", "now", "alike"),
    [
        ("runs/Monday_30_November_2026_08h_03m", "runs/Tuesday_01_December_2026_11h_17m", True),
        ("a/1f0c2c5e-1b1a-4c11-9d55-0242ac120002", "a/aaaaaaaa-bbbb-cccc-dddd-eeeeeeeeeeee", True),
        ("run__1796025807", "run__1796025999", True), ("runs/5/last.pt", "runs/5/best.pt", False), ("", "runs/5", False),
    ],
)  # fmt: skip
def test_texts_of_two_starts_differ_in_numbers_days_and_drawn_names(saved: str, now: str, *, alike: bool) -> None:
    assert are_alike(saved, now) is alike


def test_what_other_modules_say_of_clocks_and_files_counts(tmp_path: Path) -> None:
    (tmp_path / "own_trainer.py").write_text(LOOP)
    (tmp_path / "own_other.py").write_text("import time, torch\ndef now():\n    return time.time(), torch.load('x')\n")
    plain = find_in_modules(str(tmp_path / "main.py"), "import own_trainer")
    both = find_in_modules(str(tmp_path / "main.py"), "import own_trainer, own_other")
    assert plain is not None
    assert both is not None
    assert (plain.nest.reads_clock, plain.nest.reads_files) == (False, False)
    assert (both.nest.reads_clock, both.nest.reads_files) == (True, True)


def test_the_module_is_imported_with_the_lines_and_then_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_imported.py").write_text(LOOP)
    monkeypatch.syspath_prepend(str(tmp_path))
    loops = find_in_modules(str(tmp_path / "main.py"), "import own_imported")
    assert loops is not None
    hook = object()
    finder = OwnFinder(loops, hook)
    finder.install()
    try:
        import own_imported

        assert getattr(own_imported, HOOK) is hook
        assert HOOK in own_imported.train.__code__.co_names
    finally:
        finder.forget()
    assert finder not in sys.meta_path
    import own_imported as anew

    assert not hasattr(anew, HOOK)
    sys.modules.pop("own_imported")


def test_a_module_of_the_same_name_that_comes_first_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = tmp_path / "first"
    first.mkdir()
    (first / "own_twice.py").write_text("TRAINS = False\n")
    (tmp_path / "own_twice.py").write_text(LOOP)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend(str(first))
    loops = find_in_modules(str(tmp_path / "main.py"), "import own_twice")
    assert loops is not None
    finder = OwnFinder(loops, object())
    finder.install()
    try:
        import own_twice

        assert not own_twice.TRAINS
        assert not hasattr(own_twice, HOOK)
    finally:
        finder.forget()


def test_a_large_package_is_read_once_for_the_names_that_hold_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "\n".join(f"def f{n}():\n    now = time.time()\n    return now\n" for n in range(200))
    tree, walk, seen = ast.parse(f"import time\n{text}"), ast.walk, 0
    size = sum(1 for _ in walk(tree))

    def counted(node: ast.AST) -> Iterator[ast.AST]:
        nonlocal seen
        for each in walk(node):
            seen += 1
            yield each

    monkeypatch.setattr(ast, "walk", counted)
    names = names_of_start([tree])
    monkeypatch.undo()
    assert names >= {"now", "f0", "f199"}
    assert seen < 10 * size, "each function was gone through for each of the others"
