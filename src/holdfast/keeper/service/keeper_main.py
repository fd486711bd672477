"""The keeper's process from start to end: arguments, log, election, signals, readiness, removal of its directory."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import resource
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from holdfast.base.errors import HoldfastError
from holdfast.base.process_label import label_process
from holdfast.base.trace import TraceFile
from holdfast.keeper.rpc.listener import Network
from holdfast.keeper.rpc.paths import RuntimePaths, job_digest
from holdfast.keeper.service.keeper import Keeper, KeeperOptions, become_keeper, clean
from holdfast.tiers.storage.encryption import KeySource
from holdfast.tiers.wire.tls import read_secret

logger = logging.getLogger(__name__)

MAX_LOG_BYTES = 4 << 20


def main(arguments: Sequence[str]) -> int:
    """Runs a keeper with these arguments; returns the exit status."""
    return run(parse(arguments))


def run(options: argparse.Namespace) -> int:
    """Runs a keeper; returns the exit status."""
    place = RuntimePaths(Path(options.runtime_dir), job_digest(options.root, options.run_id), options.node)
    os.chdir("/")  # no mount is held busy
    _allow_connections()
    label_process("hf-keeper")
    _give_way()
    if options.secret_fd >= 0 or options.key_fd >= 0:
        # A core dump would hold what they name. Linux pipes one to a handler at a limit of 0 too, and to none at 1 (fs/coredump.c).
        resource.setrlimit(resource.RLIMIT_CORE, (1, 1))
    try:
        lock = become_keeper(place)
    except (HoldfastError, OSError) as error:
        _tell(options.ready_fd, error=str(error))
        return 1
    if lock is None:
        _tell(options.ready_fd, pid=0)  # another one won; that is as good
        return 0
    _log_to(place.log, options.log_level)
    try:
        keeper = Keeper(
            KeeperOptions(
                place,
                options.root,
                options.memory_budget,
                options.linger_s,
                _network(options),
                encryption=_key_source(options.key_fd),
                metrics_port=options.metrics_port,
                run_id=options.run_id,
            )
        )
    except (HoldfastError, OSError) as error:
        _tell(options.ready_fd, error=str(error))
        clean(place)
        return 1
    trace = TraceFile(Path(options.trace_dir), f"keeper {options.node}") if options.trace_dir else None
    if trace is not None:
        keeper.observe(trace)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: keeper.stop())
    signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def announce() -> None:
        # A keeper that nobody waits for any more would only be in the way of the next one.
        if not _tell(options.ready_fd, pid=os.getpid()):
            keeper.stop()

    try:
        keeper.run(announce)
    except Exception:
        logger.exception("the keeper failed")
        return 1  # its directory stays, with the log that says why
    finally:
        if trace is not None:
            trace.close()
    clean(place)
    os.close(lock)
    return 0


def _allow_connections() -> None:
    """Allow as many descriptors as the system lets this process have: one per keeper that reports, two per slot."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _give_way() -> None:
    """No thread of ours interrupts a trainer by waking up: its share of the cores stays the same, it waits its turn.

    Else the word "copied" at the end of a save puts the sealer in the place of the trainer that says it, for as long
    as a time slice is (3 ms, a tenth of the copy of 512 MiB). sched(7), SCHED_BATCH.
    """
    if os.sched_getscheduler(0) == os.SCHED_OTHER:
        with contextlib.suppress(OSError):  # a sandbox may refuse; that costs time and nothing else
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The options of a keeper's command line."""
    parser = argparse.ArgumentParser(prog="holdfast.keeper", description="The keeper of one job on one node.")
    parser.add_argument("--root", required=True)
    parser.add_argument("--run-id", required=True)
    parser.add_argument("--node", required=True)
    parser.add_argument("--runtime-dir", required=True)
    parser.add_argument("--memory-budget", default="")
    parser.add_argument("--linger-s", type=float, default=600.0)
    parser.add_argument("--log-level", default="INFO")
    parser.add_argument("--trace-dir", default="")
    parser.add_argument("--key-fd", type=int, default=-1)
    parser.add_argument("--metrics-port", type=int, default=0)
    parser.add_argument("--ready-fd", type=int, default=-1)
    parser.add_argument("--listen", default="")
    parser.add_argument("--listen-unsafe", action="store_true")
    parser.add_argument("--secret-fd", type=int, default=-1)
    parser.add_argument("--bandwidth", type=int, default=0)
    return parser.parse_args(arguments)


def _network(options: argparse.Namespace) -> Network:
    secret = None
    if options.secret_fd >= 0:
        secret = read_secret(f"fd:{options.secret_fd}")
        os.close(options.secret_fd)
    return Network(options.listen, options.listen_unsafe, secret, options.bandwidth)


def _key_source(fd: int) -> KeySource:
    """Return where the key of encrypted files comes from."""
    if fd < 0:
        return KeySource()
    with os.fdopen(fd, "rb") as file:
        return KeySource(**json.load(file))


def _tell(fd: int, **facts: object) -> bool:
    """One line to the starter; False if it gave up or died meanwhile."""
    if fd < 0:
        return True
    try:
        os.write(fd, json.dumps(facts).encode() + b"\n")
    except BrokenPipeError:
        return False
    finally:
        os.close(fd)
    return True


class _BoundedLog(logging.StreamHandler):  # type: ignore[type-arg]  # takes a parameter from Python 3.11 on
    """A log file that starts anew when it is full: nothing may grow with time."""

    def emit(self, record: logging.LogRecord) -> None:
        if self.stream.tell() > MAX_LOG_BYTES:
            self.stream.seek(0)
            self.stream.truncate()
        super().emit(record)


def _log_to(path: Path, level: str) -> None:
    stream = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600), "w")
    handler = _BoundedLog(stream)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler])
    os.dup2(stream.fileno(), sys.stderr.fileno())  # what the interpreter itself has to say in a fault
