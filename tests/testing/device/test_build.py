"""The build of the simulated device: once, whole or not at all, and with a reason where it cannot be."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from holdfast.testing.device import build
from sample_kit import MORE


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, sources of one line, and a compiler that counts its calls in `calls`."""
    compiler = tmp_path / "compiler"
    compiler.write_text(
        '#!/bin/sh\necho >> "$(dirname "$0")/calls"\nsleep 0.3\n'
        'grep -q wrong "$(dirname "$0")/native/all.cpp" && { echo "all.cpp:1: error: wrong" >&2; exit 1; }\n'
        'while [ "$1" != -o ]; do shift; done\necho built > "$2"\n'
    )
    compiler.chmod(0o700)
    (tmp_path / "native").mkdir()
    (tmp_path / "native" / "all.cpp").write_text("right\n")
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "SOURCES", tmp_path / "native")
    return tmp_path


def calls(bench: Path) -> int:
    return len((bench / "calls").read_text().splitlines())


def test_several_at_once_build_once(bench: Path) -> None:
    built: list[Path] = []
    threads = [threading.Thread(target=lambda: built.append(build.build())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(built)) == 1
    assert built[0].read_text() == "built\n"
    assert calls(bench) == 1


def test_changed_sources_are_built_anew(bench: Path) -> None:
    first = build.build()
    (bench / "native" / "all.cpp").write_text("right, and changed\n")
    assert build.build() != first
    assert calls(bench) == 2


def test_compiler_that_refuses_leaves_nothing_and_is_quoted(bench: Path) -> None:
    (bench / "native" / "all.cpp").write_text("wrong\n")
    with pytest.raises(build.BuildFailed, match=r"all\.cpp:1: error: wrong"):
        build.build()
    assert not build.library().exists()
    assert [path.name for path in build.library().parent.iterdir()] == ["lock"]


def test_without_a_compiler_there_is_a_reason(bench: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(bench))
    assert build.unavailable() == "the simulated device needs a C++ compiler (g++ or clang++) to be built"
    with pytest.raises(build.BuildFailed, match=r"needs a C\+\+ compiler"):
        build.build()


@MORE
def test_nothing_of_it_imports_the_rest_of_holdfast() -> None:
    code = (
        "import sys; from holdfast.testing.device import build, process_group, torch_sim\n"
        "print(*[m for m in sys.modules if m.startswith('holdfast.') and not m.startswith('holdfast.testing')])"
    )
    answer = subprocess.run([sys.executable, "-c", code], env=os.environ, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.split() == []
