"""What a rank of tests/elastic/watch_jobs.py does at one step: healthy oddities, which end, and hangs, which do not."""

from __future__ import annotations

import concurrent.futures
import ctypes
import fcntl
import http.server
import multiprocessing
import os
import queue
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch
import torch.distributed as dist

# For so long a healthy oddity lasts: with limits of a thirtieth, like 4.5 minutes; a loader's object takes less.
ODD_S = float(os.environ.get("ODD_S", "9"))
BUSY = "import time\nend = time.time() + float({})\nwhile time.time() < end: pass"


def _in_children(command: str) -> None:
    subprocess.run(["bash", "-c", command], check=True)


def own_thread(seconds: float = ODD_S) -> None:
    """An asynchronous save: the main thread waits for the future of its own thread, which compresses."""

    def compress() -> None:
        data, end = os.urandom(1 << 18), time.time() + seconds
        while time.time() < end:
            zlib.compress(data, 6)
            time.sleep(0.02)

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        pool.submit(compress).result()


def own_thread_by_lock() -> None:
    """The same, and no frame tells what it waits for."""
    thread, done = threading.Thread(target=own_thread), threading.Lock()
    done.acquire()
    thread.start()
    threading.Thread(target=lambda: (thread.join(), done.release())).start()
    done.acquire()


def grandchildren() -> None:
    """A shell whose children compute one after the other, as ninja and nvcc do."""
    each = ODD_S / 3
    _in_children(f"for i in 1 2 3; do {sys.executable} -c '{BUSY.format(each)}'; done; true")


def orphan() -> None:
    """The shell has ended; who computes has another parent, and the main thread waits at a pipe."""
    with tempfile.TemporaryDirectory() as directory:
        pipe = f"{directory}/done"
        os.mkfifo(pipe)
        _in_children(f"({sys.executable} -c '{BUSY.format(ODD_S)}'; echo > {pipe}) > /dev/null &")
        with open(pipe) as done:
            done.read()


def answer(seconds: float = ODD_S) -> None:
    """A judge, or a licence server, that takes its time."""

    class Slow(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            time.sleep(seconds)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Slow)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/", timeout=1000).close()
    server.shutdown()
    server.server_close()


def download() -> None:
    """Bytes come in through `recv`, in a function of the script's own."""
    ours, theirs = socket.create_server(("127.0.0.1", 0)), socket.socket()
    sender = os.fork()
    if not sender:
        theirs.connect(ours.getsockname())
        end = time.time() + ODD_S
        while time.time() < end:
            theirs.sendall(bytes(1 << 17))
            time.sleep(0.5)
        os._exit(0)
    theirs.close()
    link, _ = ours.accept()
    while link.recv(1 << 20):
        pass
    os.waitpid(sender, 0)
    for one in (ours, link):
        one.close()


def export() -> None:
    """A file that one rank writes slowly."""
    end = time.time() + ODD_S
    with tempfile.TemporaryFile() as file:
        while time.time() < end:
            file.write(bytes(1 << 18))
            file.flush()
            file.seek(0)
            time.sleep(0.3)


def roll_outs() -> None:
    """A queue of another process that is filled later."""
    filled: multiprocessing.Queue[int] = multiprocessing.get_context("fork").Queue()
    process = multiprocessing.get_context("fork").Process(target=lambda: (time.sleep(ODD_S), filled.put(1)))
    process.start()
    filled.get()
    process.join()


def breakpoint_() -> None:
    """A person looks at a prompt, and goes on."""
    keyboard, person = os.pipe()
    os.dup2(keyboard, 0)
    sys.stdin, sys.stdout = os.fdopen(0), sys.stderr
    threading.Timer(ODD_S, os.write, (person, b"continue\n")).start()
    breakpoint()  # noqa: T100 - what this is about


def debugger_holds() -> None:
    """Somebody attached to it with ptrace, as gdb and strace do."""
    import ctypes

    libc, rank = ctypes.CDLL(None, use_errno=True), os.getpid()
    libc.prctl(0x59616D61, ctypes.c_ulong(-1), 0, 0, 0)  # PR_SET_PTRACER, any
    tracer = os.fork()
    if not tracer:
        libc.ptrace(16, rank, 0, 0)  # PTRACE_ATTACH
        time.sleep(ODD_S)
        libc.ptrace(17, rank, 0, 0)  # PTRACE_DETACH
        os._exit(0)
    os.waitpid(tracer, 0)


def memory() -> None:
    """A list grows; nothing is read or written."""
    held, end = [], time.time() + ODD_S
    while time.time() < end:
        held.append(b"x" * (12 << 20))
        time.sleep(0.8)
        if len(held) > 6:
            held.clear()


def evaluate(model: torch.nn.Module) -> None:
    """Alone, and quiet."""
    model.eval()
    time.sleep(ODD_S)
    model.train()


def tokenises() -> None:
    """It computes alone, and nobody announced it."""
    end = time.time() + ODD_S
    while time.time() < end:
        sum(range(1000))
        time.sleep(0.001)


# Plain calls of C, of which no frame of Python tells: each ends well when a child of the rank does its part.

_libc = ctypes.CDLL(None, use_errno=True)


@contextmanager
def _later(act: Callable[[], object], prepare: Callable[[], object] = lambda: None) -> Iterator[int]:
    """A child that prepares, and acts after `ODD_S`; the block begins when it is prepared."""
    ready, told = os.pipe()
    child = os.fork()
    if not child:
        prepare()
        os.write(told, b"r")
        time.sleep(ODD_S)
        act()
        os._exit(0)
    os.close(told)
    os.read(ready, 1)
    os.close(ready)
    try:
        yield child
    finally:
        with suppress(ChildProcessError):
            os.waitpid(child, 0)


def receives() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, _later(lambda: theirs.send(b"x")):
        assert ours.recv(1)


def thread_receives() -> None:
    """At a bare lock, for a thread that waits in silence: what C++ with threads of its own looks like."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as ours:
        ours.connect(server.getsockname())
        theirs, done = server.accept()[0], threading.Lock()
        done.acquire()
        with theirs, _later(lambda: theirs.send(b"x")):
            threading.Thread(target=lambda: (ours.recv(1), done.release())).start()
            done.acquire()


def accepts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        with _later(lambda: socket.create_connection(server.getsockname())):
            server.accept()[0].close()


def reads_a_pipe() -> None:
    ours, theirs = os.pipe()
    with _later(lambda: os.write(theirs, b"x")):
        assert os.read(ours, 1)
    os.close(ours)
    os.close(theirs)


def fills_a_pipe() -> None:
    ours, theirs = os.pipe()
    os.write(theirs, bytes(fcntl.fcntl(theirs, fcntl.F_GETPIPE_SZ)))
    with _later(lambda: os.read(ours, 1 << 20)):
        os.write(theirs, b"x")
    os.close(ours)
    os.close(theirs)


def opens_a_pipe() -> None:
    with tempfile.TemporaryDirectory() as directory:
        pipe = f"{directory}/pipe"
        os.mkfifo(pipe)
        with _later(lambda: os.close(os.open(pipe, os.O_WRONLY))):
            os.close(os.open(pipe, os.O_RDONLY))


def _waits_for(ready: Callable[[int], object]) -> None:
    ours, theirs = os.pipe()
    with _later(lambda: os.write(theirs, b"x")):
        assert ready(ours)
    os.close(ours)
    os.close(theirs)


def _by_poll(fd: int) -> object:
    asked = select.poll()
    asked.register(fd, select.POLLIN)
    return asked.poll()


def _by_epoll(fd: int) -> object:
    with select.epoll() as asked:
        asked.register(fd, select.EPOLLIN)
        return asked.poll()


def polls_in_c() -> None:
    """A library that takes every error for one, EINTR too."""
    assert _libc.poll(None, 0, int(ODD_S * 1000)) == 0, os.strerror(ctypes.get_errno())


def selects_in_c() -> None:
    timeout = (ctypes.c_long * 2)(int(ODD_S), 0)
    assert _libc.select(0, None, None, None, ctypes.byref(timeout)) == 0, os.strerror(ctypes.get_errno())


def _locked(lock: Callable[[int, int], object]) -> None:
    with tempfile.NamedTemporaryFile() as file:
        with _later(lambda: None, lambda: lock(os.open(file.name, os.O_RDWR), fcntl.LOCK_EX)):
            lock(file.fileno(), fcntl.LOCK_EX)


def waits_for_a_child() -> None:
    with _later(lambda: None) as child:
        os.waitpid(child, 0)


def waits_for_a_signal() -> None:
    rank, before = os.getpid(), signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
    with _later(lambda: os.kill(rank, signal.SIGUSR2)):
        signal.sigwait({signal.SIGUSR2})
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def waits_for_an_event() -> None:
    event = os.eventfd(0)
    with _later(lambda: os.eventfd_write(event, 1)):
        os.eventfd_read(event)
    os.close(event)


def waits_for_a_message() -> None:
    queue_ = _libc.msgget(0, 0o600)
    message = (ctypes.c_long * 2)(1, 0)
    try:
        with _later(lambda: _libc.msgsnd(queue_, ctypes.byref(message), 8, 0)):
            assert _libc.msgrcv(queue_, ctypes.byref(message), 8, 0, 0) == 8, os.strerror(ctypes.get_errno())
    finally:
        _libc.msgctl(queue_, 0, None)


def waits_for_a_semaphore() -> None:
    semaphore = _libc.semget(0, 1, 0o600)
    up, down = ((ctypes.c_short * 3)(0, by, 0) for by in (1, -1))
    try:
        with _later(lambda: _libc.semop(semaphore, ctypes.byref(up), 1)):
            assert _libc.semop(semaphore, ctypes.byref(down), 1) == 0, os.strerror(ctypes.get_errno())
    finally:
        _libc.semctl(semaphore, 0, 0)


def _forever() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def no_packet() -> None:
    """The other end is there, and says nothing."""
    ours, theirs = socket.socketpair()
    with theirs:
        ours.recv(1)


def lock_and_beats() -> None:
    """With a thread that lives on: a heartbeat."""
    threading.Thread(target=lambda: [time.sleep(0.3) for _ in range(1000)], daemon=True).start()
    _forever()


def polls() -> None:
    """It looks for a file that never comes."""
    while True:
        time.sleep(1)


def spins() -> None:
    while True:
        pass


def crosses(model: torch.nn.Module) -> None:
    """Both ranks stand in collectives, of two groups."""
    group = dist.new_group()
    pair = [group, dist.group.WORLD]
    if dist.get_rank():
        pair.reverse()
    for one in pair:
        dist.barrier(group=one)


def hangs_in_evaluation(model: torch.nn.Module) -> None:
    model.eval()
    _forever()


CALLS: dict[str, Callable[[], None]] = {
    "recv": receives,
    "recv of a thread": thread_receives,
    "accept": accepts,
    "read of a pipe": reads_a_pipe,
    "write to a full pipe": fills_a_pipe,
    "open of a pipe": opens_a_pipe,
    "select": lambda: _waits_for(lambda fd: select.select([fd], [], [])[0]),
    "poll": lambda: _waits_for(_by_poll),
    "epoll": lambda: _waits_for(_by_epoll),
    "poll in C": polls_in_c,
    "select in C": selects_in_c,
    "flock": lambda: _locked(fcntl.flock),
    "lockf": lambda: _locked(fcntl.lockf),
    "waitpid": waits_for_a_child,
    "sigwait": waits_for_a_signal,
    "eventfd": waits_for_an_event,
    "msgrcv": waits_for_a_message,
    "semop": waits_for_a_semaphore,
}
HEALTHY: dict[str, Callable[[torch.nn.Module], None]] = {
    "own thread": lambda _: own_thread(),
    "own thread by lock": lambda _: own_thread_by_lock(),
    "grandchildren": lambda _: grandchildren(),
    "orphan": lambda _: orphan(),
    "answer": lambda _: answer(),
    "download": lambda _: download(),
    "export": lambda _: export(),
    "roll-outs": lambda _: roll_outs(),
    "breakpoint": lambda _: breakpoint_(),
    "debugger": lambda _: debugger_holds(),
    "memory": lambda _: memory(),
    "evaluates": evaluate,
    "tokenises": lambda _: tokenises(),
    "sleep": lambda _: time.sleep(ODD_S),
    "child": lambda _: _in_children(f"sleep {ODD_S}"),
    "slow object": lambda _: None,  # in the loader
    **{name: lambda _, call=call: call() for name, call in CALLS.items()},  # type: ignore[misc]
}  # fmt: skip
SICK: dict[str, Callable[[torch.nn.Module], None]] = {
    "stopped": lambda _: os.kill(os.getpid(), signal.SIGSTOP),
    "lock": lambda _: _forever(),
    "lock and beats": lambda _: lock_and_beats(),
    "no object": lambda _: None,  # in the loader
    "crossed": crosses,
    "no answer": lambda _: answer(10_000.0),
    "empty queue": lambda _: multiprocessing.get_context("fork").Queue().get(),
    "empty own queue": lambda _: queue.Queue[int]().get(),
    "child hangs": lambda _: _in_children("sleep 10000"),
    "polls": lambda _: polls(),
    "no packet": lambda _: no_packet(),
    "spins": lambda _: spins(),
    "evaluation hangs": hangs_in_evaluation,
}
# Of these both ranks do it.
BOTH = ("crossed",)
