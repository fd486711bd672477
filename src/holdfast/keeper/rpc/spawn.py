"""Starting a keeper, or finding the one that runs: what `holdfast run` and the first rank call.

Of several starters one spawns, under a lock; the others wait for it and find the keeper. The keeper is detached: own
session (torchrun's kill of a process group does not reach it), forked twice (no zombie stays with the trainer). That
it listens is known from a pipe that it inherits, never from waiting a while.
"""

from __future__ import annotations

import json
import logging
import os
import select
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path

import holdfast
from holdfast.base import private, program
from holdfast.base.config import Config, parse_size
from holdfast.base.errors import ConfigError, KeeperError, KeeperLost, KeeperNotStarted
from holdfast.base.handler_errors import forgive, pass_on
from holdfast.keeper.rpc.caller import ring
from holdfast.keeper.rpc.listener import Network, hidden
from holdfast.keeper.rpc.messages import VIEWER, Hello
from holdfast.keeper.rpc.paths import RuntimePaths, absolute_root, place_of
from holdfast.keeper.rpc.stopped_keeper import wake
from holdfast.tiers.storage.encryption import KeySource
from holdfast.tiers.wire.tls import read_secret

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 20.0
ANSWER_TIMEOUT_S = 2.0
# No attempt is cut short by those before it: a slow start would be blamed for what a frozen keeper did.
ATTEMPT_S = 5.0
# How often who waits for one that does not answer says so.
TELL_EVERY_S = 30.0
_MAX_READY_BYTES = 64 << 10


def ensure_keeper(
    root: str, config: Config, *, timeout_s: float = START_TIMEOUT_S, patience_s: float = 0.0
) -> RuntimePaths:
    """The place of a keeper that listens for the job saving to `root`; started if there is none, continued if a signal stopped it.

    Args:
        root: checkpoint path or URL.
        config: the settings of the job.
        timeout_s: how long the start of one may take.
        patience_s: how long one that is there and does not answer is waited for besides, aloud: it may hold what nobody else has.

    Raises:
        ConfigError: the runtime directory is unfit. KeeperNotStarted: it crashed or hung before it listened, or another
            user made the directory first that is ours by default.
        KeeperError: it refused its settings, in its own words; or one is there and does not answer.
    """
    place = place_of(root, config)
    deadline = said_s = time.monotonic() + timeout_s
    _make(place, config)
    spawned = False
    while not _answers(place):
        holder = _holder(place)
        wake(place.directory)
        # After a first attempt another keeper holds the lock without answering: it is starting, dying, or frozen.
        if spawned and (now := time.monotonic()) > deadline:
            silent = f"keeper {holder} holds the lock and does not answer"
            remedy = "kill that process; a new keeper is then started"
            if now > deadline + patience_s:
                raise KeeperError(silent, where=str(place.directory), remedy=remedy)
            if now >= said_s:
                said_s = now + TELL_EVERY_S
                logger.warning("%s: it is waited for, %.0f s more; %s", silent, deadline + patience_s - now, remedy)
        until = max(deadline, time.monotonic() + ATTEMPT_S)
        lock = _lock_within(place, until)
        try:
            until = max(deadline, time.monotonic() + ATTEMPT_S)
            if _answers(place) or _spawn(place, absolute_root(root), config, until):
                break
        finally:
            os.close(lock)
        spawned = True
    return place


def _make(place: RuntimePaths, config: Config) -> None:
    """Make the place. The name of a default runtime directory can be guessed: who takes it must not stop a job."""
    try:
        place.make()
    except ConfigError as error:
        if config.runtime_dir or not private.is_anothers(place.runtime):
            raise
        raise KeeperNotStarted(error.what, where=error.where, remedy=error.remedy) from error


def _answers(place: RuntimePaths) -> bool:
    """Return whether a keeper greets there. A connection alone proves nothing: the kernel accepts for a dying process
    too.
    """
    hello = Hello(job=place.job, role=VIEWER)
    try:
        ring(place.address, hello, timeout_s=ANSWER_TIMEOUT_S)
    except KeeperLost as error:
        pass_on(error)
        return False
    return True


def _holder(place: RuntimePaths) -> str:
    with forgive(OSError):
        return place.keeper_lock.read_text().strip() or "?"
    return "?"


def _lock_within(place: RuntimePaths, deadline: float) -> int:
    """The start lock. flock knows no deadline, so a thread waits for it and may be left behind until it gets it."""
    taken: list[int] = []
    failed: list[OSError] = []
    is_given_up = False

    def wait() -> None:
        try:
            fd = place.lock(place.start_lock, blocking=True)
        except OSError as error:
            failed.append(error)
            return
        if fd is not None:
            taken.append(fd)
        if is_given_up:
            let_go()

    def let_go() -> None:
        with suppress(IndexError):  # both threads may be at it
            while True:
                os.close(taken.pop())

    thread = threading.Thread(target=wait, name="holdfast start lock", daemon=True)
    try:
        thread.start()
        thread.join(max(0.1, deadline - time.monotonic()))
        if not taken:
            why = failed[0].strerror if failed else "another process holds the start lock and does not finish"
            raise KeeperError(f"the keeper was not started: {why}", where=str(place.directory))
        return taken[0]
    except BaseException:  # of a signal's handler, too; else the thread would keep the lock until this process ends
        is_given_up = True  # without a lock, which a handler would keep
        let_go()
        raise


def _spawn(place: RuntimePaths, root: str, config: Config, deadline: float) -> bool:
    """Starts a keeper; False if it found another one that holds the lock."""
    network = network_of(config)  # before anything is started: a wrong setting is told as such
    secret_fd = hidden(network.secret.hex().encode()) if network.secret is not None else -1
    encryption = KeySource.of(config)
    key = {"setting": encryption.setting, "required": encryption.required}
    key_fd = hidden(json.dumps(key).encode()) if config.encryption_key else -1  # a command may have it among its words
    ready, theirs = os.pipe()
    try:
        command = program.command(
            "holdfast.keeper",
            "--root", root, "--run-id", config.run_id, "--node", place.node,
            "--runtime-dir", str(place.runtime), "--memory-budget", config.memory_budget,
            "--linger-s", str(config.linger_s), "--log-level", config.log_level, "--ready-fd", str(theirs),
            "--listen", network.listen, "--secret-fd", str(secret_fd), "--bandwidth", str(network.bandwidth),
            *(["--listen-unsafe"] if network.unsafe else []),
            "--key-fd", str(key_fd), "--metrics-port", str(config.metrics_port),
            "--trace-dir", config.trace_dir,
        )  # fmt: skip
        try:
            launcher = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[fd for fd in (theirs, secret_fd, key_fd) if fd >= 0],
                start_new_session=True,
                env=_environment(),
            )
        finally:
            os.close(theirs)
        _reap(launcher, deadline)
        return _await_ready(ready, place, deadline)
    finally:
        for fd in (ready, secret_fd, key_fd):
            if fd >= 0:
                os.close(fd)


def network_of(config: Config) -> Network:
    """Return how a keeper under these settings talks to other nodes.

    Raises:
        ConfigError: an address without a secret, of all interfaces, or an unfit secret file.
    """
    secret = read_secret(config.secret_file) if config.secret_file else None
    return Network(config.listen, config.listen_unsafe, secret, parse_size(config.replicate_bandwidth or "0"))


def _reap(launcher: subprocess.Popen[bytes], deadline: float) -> None:
    """The launcher forks the keeper and exits at once; this leaves no zombie."""
    try:
        launcher.wait(max(0.1, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        launcher.kill()
        launcher.wait()


def _await_ready(ready: int, place: RuntimePaths, deadline: float) -> bool:
    said = bytearray()
    while b"\n" not in said and len(said) < _MAX_READY_BYTES:
        if not select.select([ready], [], [], max(0.0, deadline - time.monotonic()))[0]:
            raise KeeperNotStarted("the keeper did not get ready in time", where=str(place.log))
        part = os.read(ready, 4096)
        if not part:
            raise KeeperNotStarted("the keeper ended while it started", where=str(place.log))
        said += part
    answer = json.loads(said)
    if "error" in answer:
        raise KeeperError(f"the keeper did not start: {answer['error']}", where=str(place.log))
    return bool(answer["pid"])


def _environment() -> dict[str, str]:
    """The keeper imports the same holdfast as we do, wherever it came from."""
    here = str(Path(holdfast.__file__).parent.parent)
    paths = [here, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}
