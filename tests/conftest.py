"""What every test may rely on: a runtime directory of its own, reasons for what is skipped, and nothing left behind.

The suite marks its environment with one variable. Whatever process still carries the mark when the suite is over, and
whatever file, socket or memory descriptor remains, was left behind by a test: the suite fails and names it. Promise
V5 of docs/promises.md rests on this check.
"""

from __future__ import annotations

import compileall
import gc
import importlib.util
import os
import shutil
import signal
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import settings

import device_kit
import forked

# Property tests have no deadline per example: the machine is shared, and pytest's own limit holds.
# By default they look at half as many examples as with `--slow`, where they say no number of their own.
settings.register_profile("default", deadline=None, max_examples=50)
settings.register_profile("slow", deadline=None)

# Keepers that were told to end need a moment to do so; nothing that is healthy needs longer.
GRACE_S = 30.0
MARK = "TEST_SUITE_OF_HOLDFAST"
SOURCES = Path(__file__).resolve().parent.parent / "src"


class Leftovers:
    """The marks of one run of the suite, and what still carries them."""

    def __init__(self) -> None:
        self.mark = uuid.uuid4().hex
        # Short: a Unix socket's path may have 107 bytes, and pytest's own directories are long.
        self.root = Path(tempfile.mkdtemp(prefix="hf-"))
        self.memory_before = _own_memory_files()
        os.environ[MARK] = self.mark
        os.environ["HOLDFAST_RUNTIME_DIR"] = str(self.root / "default")

    def processes(self) -> list[psutil.Process]:
        """Living processes, other than this one, that inherited the mark."""
        return [p for p in psutil.process_iter() if p.pid != os.getpid() and self._is_marked(p)]

    def _is_marked(self, process: psutil.Process) -> bool:
        try:
            alive = process.status() != psutil.STATUS_ZOMBIE
            return alive and process.environ().get(MARK) == self.mark
        except (psutil.Error, OSError):
            return False

    def wait(self) -> list[str]:
        """What is left when the grace is over; one line for each."""
        deadline = time.monotonic() + GRACE_S
        while self.processes() and time.monotonic() < deadline:
            time.sleep(0.05)
        lines = [f"process {p.pid}: {' '.join(p.cmdline())[:200]}" for p in self.processes()]
        lines += [f"zombie {p.pid}" for p in psutil.Process().children() if p.status() == psutil.STATUS_ZOMBIE]
        files = [path for path in sorted(self.root.rglob("*")) if not path.is_dir() or path.is_symlink()]
        lines += [f"file {path}" for path in files if not path.parent.name.startswith("run-")]  # journals stay
        for log in (path for path in files if path.name == "keeper.log"):
            said = log.read_text(encoding="utf-8", errors="replace").splitlines()[-12:]
            lines += [f"    {line}" for line in said]  # a keeper that failed leaves its directory, and says why
        gc.unfreeze()
        gc.collect()  # what nobody can reach any more lets go of its descriptors now
        while _own_memory_files() - self.memory_before and time.monotonic() < deadline:
            time.sleep(0.05)
        lines += [f"memory {name}" for name in sorted(_own_memory_files() - self.memory_before)]
        return lines

    def clear(self) -> None:
        """Ends what was left, so that one bad test does not spoil the next run."""
        for process in self.processes():
            process.kill()
        shutil.rmtree(self.root, ignore_errors=True)


def _own_memory_files() -> set[str]:
    """Descriptors of this process that are memory files, as `number -> name`."""
    found = set()
    for link in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(link)
        except OSError:
            continue
        if target.startswith("/memfd:"):
            found.add(f"{link.name} -> {target}")
    return found


@pytest.fixture(autouse=True)
def signals_as_before() -> Iterator[None]:
    """A checkpointer that was told to end leaves SIGTERM ignored, for its process ends; this one goes on, and forks."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        if handler is not None and signal.getsignal(number) != handler:
            signal.signal(number, handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run the tests that are marked slow")
    parser.addoption(
        "--card", default="cuda", help="what tests marked gpu run on; sim: the simulated device, in this process"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.stash[LEFT_BEHIND] = []
    settings.load_profile("slow" if config.getoption("--slow") else "default")
    if not hasattr(config, "workerinput"):
        # Where the environment forbids Python to keep compiled files, every keeper would compile holdfast anew: 0.3 s each.
        compileall.compile_dir(SOURCES, quiet=2)
    if not _deals_out(config):
        config.stash[LEFTOVERS] = Leftovers()


LEFTOVERS = pytest.StashKey[Leftovers]()
LEFT_BEHIND = pytest.StashKey[list[str]]()


def _deals_out(config: pytest.Config) -> bool:
    """Whether the tests run in processes of their own (`-n 2`), each with its own marks, and this one only counts."""
    return bool(getattr(config.option, "numprocesses", None)) and not hasattr(config, "workerinput")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        for reason in _reasons_to_skip(item, slow=config.getoption("--slow"), card=config.getoption("--card")):
            item.add_marker(pytest.mark.skip(reason=reason))


def _reasons_to_skip(item: pytest.Item, *, slow: bool, card: str) -> Iterator[str]:
    if (left_out := item.get_closest_marker("slow")) and not slow:
        yield f"{left_out.kwargs.get('why', 'takes more than ten seconds')}; run with --slow"
    if item.get_closest_marker("root") and os.geteuid() != 0:
        yield "needs root"
    if item.get_closest_marker("gpu") and card == "cuda" and not Path("/dev/nvidiactl").exists():
        yield "needs a CUDA device"
    if item.get_closest_marker("device") and (reason := device_kit.unavailable()):
        yield reason
    for marker in item.iter_markers("rival"):
        if importlib.util.find_spec(marker.args[0]) is None:
            yield f"compares with {marker.args[0]}, which is not installed"


def pytest_collection_finish(session: pytest.Session) -> None:
    device_kit.prepare(session)
    # PyTorch and thousands of collected tests stay to the end: whoever looks for garbage need not go through them each time.
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """A test of the simulated device runs in a child, with those of its file; here it is reported."""
    return device_kit.report(item, nextitem) if device_kit.belongs_to_child(item) else None


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    device_kit.tell_parent(report)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    config = session.config
    if not _deals_out(config):
        forked.close()
        leftovers = config.stash[LEFTOVERS]
        config.stash[LEFT_BEHIND] = leftovers.wait()
        leftovers.clear()
    if hasattr(config, "workeroutput"):
        config.workeroutput["left behind"] = config.stash[LEFT_BEHIND]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """A process that ran tests has ended, and tells what they left behind."""
    node.config.stash[LEFT_BEHIND] += getattr(node, "workeroutput", {}).get("left behind", [])


@pytest.hookimpl(trylast=True, specname="pytest_sessionfinish")
def pytest_judge(session: pytest.Session) -> None:
    """After those that run tests have ended: what they left behind fails the run."""
    if session.config.stash[LEFT_BEHIND] and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> Iterator[None]:
    """Below what was skipped, so that whoever sees only the end of the output sees it."""
    yield
    left = config.stash.get(LEFT_BEHIND, [])
    if left:
        terminalreporter.section("left behind by the tests (this fails the run)", red=True)
        for line in left:
            terminalreporter.line(line)


@pytest.fixture(scope="module")
def without_collector() -> Iterator[None]:
    """Trees of all sources are large: looking through them for garbage takes longer than making them.

    What is garbage already is collected first: frozen, it would keep its descriptors to the end.
    """
    gc.collect()
    gc.disable()
    yield
    gc.freeze()
    gc.enable()


@pytest.fixture
def card(request: pytest.FixtureRequest) -> str:
    """The kind of device that a test marked gpu runs on (`--card`)."""
    kind = request.config.getoption("--card")
    if kind == "sim":
        from holdfast.testing import device

        device.load()
    return str(kind)


@pytest.fixture
def runtime_dir(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A short private directory for the sockets and logs of one test's keepers, in the environment too.

    What a keeper leaves in it when it ends is found at the end of the suite; logs are removed here.
    """
    leftovers = request.config.stash[LEFTOVERS]
    path = Path(tempfile.mkdtemp(prefix="t", dir=leftovers.root))
    monkeypatch.setenv("HOLDFAST_RUNTIME_DIR", str(path))
    return path
