"""Workers forked from one warm process: PyTorch is in them after some milliseconds instead of three seconds.

    worker = forked.Popen([sys.executable, script, "first"], env=environment, stdout=log, stderr=log)
    result = forked.run([sys.executable, "-m", "holdfast.elastic.launch.run_command", ...], capture_output=True, text=True, timeout=60)

Like `subprocess`, as far as tests need it: an own process id, environment, working directory, standard files, session,
exit code. Different: modules are loaded already, `/proc/<pid>/cmdline` and `environ` are those of the warm process, and
one thread per library. What a test says about *starting* therefore needs a real start; all else may be forked.

With `warm_children=True` what the worker starts by `sys.executable` is forked as well (a launcher's workers), keepers
excepted: a small process stands for it, with another process id, which passes signals on and ends as it ends.

The warm process starts at the first use, has no threads (or forking were not safe), and ends with the suite; whoever
is left of its children then dies with it.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import importlib.metadata
import json
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

HERE = Path(__file__).resolve().parent
# To the standard output, whenever ranks connect; no later torch does.
GLOO_PRINTS = importlib.metadata.version("torch").startswith("2.10.")
MAX_REQUEST_BYTES = 1 << 20
START_S = 90.0
_PR_SET_PDEATHSIG = 1
_running: list[_ForkServer] = []


# --- the test's side


class Popen:
    """A worker, forked. `command` is what `subprocess.Popen` would be given: an interpreter and its arguments.

    Attributes:
        pid, returncode: as in `subprocess`.
        stdin, stdout, stderr: the ends of pipes that were asked for.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        stdin: Any = None,
        stdout: Any = None,
        stderr: Any = None,
        text: bool = False,
        start_new_session: bool = False,
        warm_children: bool = False,
    ) -> None:
        self.args = [os.fspath(word) for word in command]
        self.returncode: int | None = None
        self.stdin, theirs_in = _plug(stdin, 0, text=text)
        self.stdout, theirs_out = _plug(stdout, 1, text=text)
        self.stderr, theirs_err = (None, theirs_out) if stderr == subprocess.STDOUT else _plug(stderr, 2, text=text)
        request = {
            "argv": self.args[1:], "env": dict(os.environ if env is None else env),
            "cwd": str(cwd or os.getcwd()), "session": start_new_session, "warm": warm_children,
        }  # fmt: skip
        self._line, self.pid = _warm().fork(request, (theirs_in, theirs_out, theirs_err))
        for fd in {theirs_in, theirs_out, theirs_err} - {0, 1, 2}:
            if fd not in (_number(stdin), _number(stdout), _number(stderr)):
                os.close(fd)

    def poll(self) -> int | None:
        """The exit code, if it ended."""
        if self.returncode is None and select.select([self._line], [], [], 0)[0]:
            self._take()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, when it ended."""
        if self.returncode is None:
            if not select.select([self._line], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            self._take()
        assert self.returncode is not None
        return self.returncode

    def _take(self) -> None:
        said = self._line.recv(64)
        self._line.close()
        self.returncode = os.waitstatus_to_exitcode(int(said)) if said else -signal.SIGKILL

    def send_signal(self, number: int) -> None:
        """Sends a signal, if it still lives."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, input: Any = None, timeout: float | None = None) -> tuple[Any, Any]:  # noqa: A002
        """All it wrote, and its end."""
        said: dict[str, Any] = {}
        files = {name: file for name, file in (("out", self.stdout), ("err", self.stderr)) if file is not None}
        readers = [
            threading.Thread(target=lambda name=name, file=file: said.update({name: file.read()}), daemon=True)
            for name, file in files.items()
        ]
        for reader in readers:
            reader.start()
        if self.stdin is not None:
            if input:
                self.stdin.write(input)
            self.stdin.close()
        deadline = None if timeout is None else time.monotonic() + timeout
        self.wait(timeout)
        for reader in readers:
            reader.join(None if deadline is None else max(0.1, deadline - time.monotonic()))
        self._close()
        return said.get("out"), said.get("err")

    def _close(self) -> None:
        for file in (self.stdin, self.stdout, self.stderr):
            if file is not None:
                file.close()

    def __enter__(self) -> Popen:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()
        self.wait()


def run(
    command: Sequence[str],
    *,
    capture_output: bool = False,
    check: bool = False,
    timeout: float | None = None,
    **options: Any,
) -> subprocess.CompletedProcess[Any]:
    """`subprocess.run`, forked."""
    if capture_output:
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = Popen(command, **options)
    try:
        out, err = process.communicate(timeout=timeout)
    except BaseException:
        process.kill()
        process.wait()
        process._close()
        raise
    result = subprocess.CompletedProcess(process.args, process.wait(), out, err)
    if check:
        result.check_returncode()
    return result


def close() -> None:
    """Ends the warm process; the suite does that before it looks for what was left behind."""
    while _running:
        _running.pop().close()


def _warm() -> _ForkServer:
    if not _running:
        _running.append(_ForkServer())
    return _running[0]


def _number(file: Any) -> int | None:
    return file if isinstance(file, int) else None if file is None else file.fileno()


def _plug(file: Any, standard: int, *, text: bool) -> tuple[IO[Any] | None, int]:
    """Our end and the worker's descriptor."""
    if file == subprocess.PIPE:
        read, write = os.pipe()
        ours, theirs, mode = (write, read, "w") if standard == 0 else (read, write, "r")
        opened = os.fdopen(ours, mode if text else f"{mode}b", encoding="utf-8" if text else None)
        return (_WithoutGloo(opened) if standard == 1 and GLOO_PRINTS else opened), theirs  # type: ignore[return-value]
    if file == subprocess.DEVNULL:
        return None, os.open(os.devnull, os.O_RDWR)
    if file is None:  # pytest may have put something else there than a descriptor says
        return None, standard
    if not isinstance(file, int):
        file.flush()
    return None, _number(file) or 0


class _WithoutGloo:
    """The output of a worker without what gloo of torch 2.10 prints between its lines."""

    def __init__(self, file: IO[Any]) -> None:
        self._file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __iter__(self) -> Iterator[Any]:
        return (line for line in self._file if not line.startswith(b"[Gloo]" if isinstance(line, bytes) else "[Gloo]"))

    def readline(self) -> Any:
        return next(iter(self), self._file.read(0))

    def read(self) -> Any:
        return self._file.read(0).join(self)


class _ForkServer:
    """Our line to the warm process."""

    def __init__(self) -> None:
        self._directory = tempfile.mkdtemp(prefix="hf-forked-")
        self._address = f"{self._directory}/s"
        stand_in = Path(self._directory, "python")
        stand_in.write_text(STAND_IN.format(python=sys.executable, address=self._address))
        stand_in.chmod(0o700)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", __file__, self._address],
            env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], START_S)
        assert ready, "the warm process does not come up"
        assert self._process.stdout.readline() == b"warm\n"

    def fork(self, request: Mapping[str, Any], descriptors: Sequence[int]) -> tuple[socket.socket, int]:
        line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MAX_REQUEST_BYTES)
        line.connect(self._address)
        socket.send_fds(line, [json.dumps(request).encode()], list(descriptors))
        return line, int(line.recv(64))

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()
        shutil.rmtree(self._directory)


# Stands for a forked worker where a real process starts an interpreter. `-IS`: it is up in a hundredth of a second.
STAND_IN = """#!{python} -IS
import json, os, signal, socket, sys
words = sys.argv[1:]
if "holdfast.keeper" in words[:4]:
    os.execv({python!r}, [{python!r}, *words])
line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
line.connect({address!r})
request = {{"argv": words, "env": dict(os.environ), "cwd": os.getcwd(), "session": False, "warm": True}}
socket.send_fds(line, [json.dumps(request).encode()], [0, 1, 2])
pid = int(line.recv(64))
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
    signal.signal(number, lambda number, _: os.kill(pid, number))
code = os.waitstatus_to_exitcode(int(line.recv(64) or signal.SIGKILL))
if code < 0:
    if -code != signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
"""


# --- the warm process


def serve(address: str) -> None:
    """Forks on request until the suite closes our standard input; a worker's line tells its process id, and later its
    exit status.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door:
        door.bind(address)
        door.listen(64)
        _load()
        print("warm", flush=True)
        poll = select.poll()
        poll.register(door, select.POLLIN)
        poll.register(0, 0)  # hang-up alone
        workers: dict[int, tuple[int, socket.socket]] = {}  # pidfd -> process id, line
        lines: dict[int, int] = {}  # line -> process id
        while True:
            for fd, _ in poll.poll():
                if fd == 0:
                    return
                if fd in lines:  # whoever asked for this worker is gone
                    poll.unregister(fd)
                    os.kill(lines.pop(fd), signal.SIGKILL)
                    continue
                if fd in workers:
                    poll.unregister(fd)
                    pid, line = workers.pop(fd)
                    if lines.pop(line.fileno(), None):
                        poll.unregister(line)
                    _bury(fd, pid, line)
                    continue
                line, _ = door.accept()
                request, files, _, _ = socket.recv_fds(line, MAX_REQUEST_BYTES, 3)
                pid = _fork(json.loads(request), files, [door, line, *(line for _, line in workers.values())])
                pidfd = os.pidfd_open(pid)
                line.send(str(pid).encode())
                workers[pidfd] = (pid, line)
                poll.register(pidfd, select.POLLIN)
                lines[line.fileno()] = pid
                poll.register(line, 0)  # hang-up alone


def _load() -> None:
    """What nearly every worker loads, and what PyTorch loads at the first step of an optimizer."""
    import torch
    import torch.distributed.fsdp
    import torch.distributed.tensor.parallel
    import torch.nn.parallel

    import holdfast.checkpoint.checkpointer.checkpointer
    import holdfast.cli.cli
    import holdfast.elastic.launch.run_command  # noqa: F401
    from holdfast.testing.drill import warmup

    torch.set_num_threads(1)
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.zeros(2)
    torch.optim.AdamW([parameter]).step()
    warmup.settle()
    gc.enable()


def _fork(request: Mapping[str, Any], files: Sequence[int], ours: Sequence[socket.socket]) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid:
        for fd in files:
            os.close(fd)
        return pid
    code = 70
    try:
        _die_with(parent)
        for line in ours:
            line.close()
        _become(request, files)
        code = _execute(request["argv"])
    except BaseException:  # noqa: BLE001 - top of the process
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        if code == -signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        os._exit(code)
    raise AssertionError("unreachable")


def _become(request: Mapping[str, Any], files: Sequence[int]) -> None:
    for standard, fd in enumerate(files):
        os.dup2(fd, standard)
    for fd in set(files) - {0, 1, 2}:
        os.close(fd)
    if request["session"]:
        os.setsid()
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    if request["warm"]:
        sys.executable = f"{os.path.dirname(sys.argv[1])}/python"
    faulthandler.enable()
    for path in reversed(request["env"].get("PYTHONPATH", "").split(os.pathsep)):
        if path and path not in sys.path:
            sys.path.insert(0, path)


def _bury(pidfd: int, pid: int, line: socket.socket) -> None:
    os.close(pidfd)
    status = os.waitpid(pid, 0)[1]
    with contextlib.suppress(OSError):  # nobody waits for it any more
        line.send(str(status).encode())
    line.close()


def _execute(words: list[str]) -> int:
    """What `python <words>` would do; returns the exit code."""
    while words[0] in {"-W", "-X", "-u"}:
        words = words[1 if words[0] == "-u" else 2 :]
    code = 0
    try:
        if words[0] == "-m":
            sys.argv = [words[1], *words[2:]]
            sys.modules["__main__"] = types.ModuleType("__main__")
            runpy._run_module_as_main(words[1])  # type: ignore[attr-defined]  # as an interpreter: it stays to the end
        else:
            _run_source(words)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException as error:  # noqa: BLE001 - what an interpreter does at its top
        sys.excepthook(type(error), error, error.__traceback__)
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    threading._shutdown()  # type: ignore[attr-defined]  # an interpreter waits for its threads, then runs exit handlers
    atexit._run_exitfuncs()
    return code


def _run_source(words: list[str]) -> None:
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    if words[0] == "-c":
        source, path, sys.argv = words[1], "<string>", ["-c", *words[2:]]
        sys.path.insert(0, "")
    else:
        path, sys.argv = words[0], list(words)
        source = Path(path).read_text(encoding="utf-8")
        sys.path.insert(0, str(Path(path).resolve().parent))
        main.__file__ = path
    exec(compile(source, path, "exec"), main.__dict__)


def _die_with(parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(70)


if __name__ == "__main__":
    del sys.path[0]  # a worker gets its own
    serve(sys.argv[1])
