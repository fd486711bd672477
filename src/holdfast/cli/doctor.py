"""`holdfast doctor`: whether this machine, and a checkpoint path, can keep the promises.

Every check does the real thing on a small scale and says what it saw, with numbers; none guesses from names of file
systems. What it writes it removes: one directory of its own beneath the checkpoint path (or, where that does not exist
yet, beneath its nearest parent). Looks at nothing that belongs to somebody else's job.
"""

from __future__ import annotations

import errno
import importlib.metadata
import mmap
import os
import platform
import re
import secrets
import select
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from holdfast.base import private
from holdfast.base.config import Config, load
from holdfast.base.errors import Fenced, HoldfastError
from holdfast.cli import console, tested_versions
from holdfast.keeper.rpc.listener import is_everywhere, is_loopback
from holdfast.keeper.rpc.messages import KEEPER
from holdfast.keeper.rpc.paths import place_of
from holdfast.keeper.rpc.spawn import network_of
from holdfast.tiers.backends.interface import TEMPORARY, Backend
from holdfast.tiers.backends.local import LocalBackend, translate
from holdfast.tiers.backends.open_url import is_bucket, open_backend
from holdfast.tiers.memory import memory_pages
from holdfast.tiers.memory.memory_budget import allowed_bytes, read_limits
from holdfast.tiers.memory.slots import Slot
from holdfast.tiers.storage.incarnations import NOT_FOREIGN, read_job
from holdfast.tiers.wire import frames, tcp
from holdfast.tiers.wire.frames import unix_path
from holdfast.tiers.wire.tls import Credentials

GOOD, NOTE, PROBLEM = "good", "note", "problem"
OLDEST_TORCH = (2, 10)
TRIAL_BYTES = 8 << 20
LITTLE_SPACE_BYTES = 10 << 30
MARKER = "holdfast.json"
TRIAL_S = 5.0
_POPULATE_READ = 22  # MADV_POPULATE_READ, Linux 5.14


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at: what was seen, and what to do if it is not good."""

    name: str
    state: str
    detail: str
    remedy: str = ""


def doctor(root: str | None, *, as_json: bool) -> int:
    """Runs all checks and prints them; the exit code."""
    settings = load()
    checks = list(machine_checks(settings, root or "/checkpoints"))
    if root is not None:
        checks += bucket_checks(root) if is_bucket(root) else directory_checks(root)
    healthy = all(check.state != PROBLEM for check in checks)
    if as_json:
        rows = [{"name": c.name, "state": c.state, "detail": c.detail, "remedy": c.remedy} for c in checks]
        console.print_json({"healthy": healthy, "checks": rows})
    else:
        console.print_table(("check", "state", "seen"), [(c.name, c.state, c.detail) for c in checks])
        for check in checks:
            if check.remedy:
                console.say(f"{check.name}: {check.remedy}")
    return console.GOOD if healthy else console.PROBLEM


def machine_checks(settings: Config, root: str) -> Iterator[Check]:
    """Check what does not depend on the checkpoint path."""
    yield Check("python", GOOD, f"{platform.python_version()} on Linux {platform.release()}")
    yield torch_version()
    yield from untested_versions()
    yield tried("snapshot memory", memory_files)
    yield tried("pre-faulting", populate)
    yield huge_pages(memory_pages.shared_memory_policy())
    yield memory_budget(settings)
    yield runtime_directory(settings, root)
    yield tried("network", lambda: network(settings, root))


def tried(name: str, trial: Callable[[], Check]) -> Check:
    """A check whose trial may be refused by the system."""
    try:
        return trial()
    except HoldfastError as error:
        return Check(name, PROBLEM, str(error.what), error.remedy)
    except OSError as error:
        return Check(name, PROBLEM, f"{error.strerror} ({errno.errorcode.get(error.errno or 0, '?')})")


def torch_version() -> Check:
    """The version that is installed, without importing it."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return Check("torch", PROBLEM, "not installed", "pip install torch")
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if numbers < OLDEST_TORCH:
        return Check("torch", PROBLEM, version, "install torch 2.10 or newer")
    return Check("torch", GOOD, version)


def untested_versions() -> Iterator[Check]:
    """Check what is installed in a release that holdfast was not tested with; nothing is said of the others."""
    for found in tested_versions.installed():
        if found.untested:
            remedy = f"it may well work; install a tested release of {found.name}, or run the tests with this one"
            yield Check(f"{found.name} release", NOTE, f"{found.version}: {found.untested}", remedy)


def memory_files() -> Check:
    """Return whether memory without a name can be had, allocated before use."""
    started = time.perf_counter()
    Slot.create(TRIAL_BYTES).close()
    seconds = time.perf_counter() - started
    per_gib = seconds * (1 << 30) / TRIAL_BYTES
    return Check("snapshot memory", GOOD, f"a sealed memfd works; one thread makes a GiB in {per_gib:.2f} s")


def populate() -> Check:
    """Return whether a mapping can be populated in one call."""
    with mmap.mmap(-1, mmap.PAGESIZE) as mapping:
        try:
            mapping.madvise(_POPULATE_READ)
        except OSError:
            return Check("pre-faulting", NOTE, "MADV_POPULATE_READ is missing (Linux before 5.14): pages are touched")
    return Check("pre-faulting", GOOD, "MADV_POPULATE_READ works")


def huge_pages(policy: str) -> Check:
    """Return whether snapshot memory comes in huge pages, by the kernel's setting for shared memory."""
    if policy in memory_pages.HUGE_POLICIES:
        return Check("huge pages", GOOD, f"shared memory may have them ({memory_pages.SHMEM_ENABLED.name}: {policy})")
    seen = (
        f"{memory_pages.SHMEM_ENABLED.name} is {policy}"
        if policy
        else f"the kernel has no {memory_pages.SHMEM_ENABLED.name}"
    )
    remedy = f"as root: {memory_pages.HUGE_ADVICE} ({memory_pages.HUGE_GAIN})" if policy else ""
    return Check("huge pages", NOTE, f"{seen}: snapshot memory comes by 4 KiB", remedy)


def memory_budget(settings: Config) -> Check:
    """Return what all keepers of this cgroup may take, and what is there."""
    limits = read_limits()
    allowed = allowed_bytes(settings.memory_budget, limits)
    detail = (
        f"{console.size_text(allowed)} allowed of {console.size_text(limits.limit)}, "
        f"{console.size_text(limits.available)} available now: room for {console.size_text(allowed // 2)} of state of this "
        f"node's ranks in two slots each, or {console.size_text(allowed // 4)} beside replicas of another node"
    )
    if allowed > limits.limit:
        return Check("memory budget", PROBLEM, detail, "set HOLDFAST_MEMORY_BUDGET below the limit of the cgroup")
    if allowed > limits.available:
        return Check("memory budget", NOTE, detail, "less is free than a job may ask for; big states will be refused")
    return Check("memory budget", GOOD, detail)


def runtime_directory(settings: Config, root: str) -> Check:
    """Return whether sockets can live where they should: rights, owner, length of the path."""
    place = place_of(root, settings)
    name, detail = "runtime directory", str(place.runtime)
    try:
        unix_path(str(place.socket))
    except HoldfastError as error:
        return Check(name, PROBLEM, error.what, error.remedy)
    if not place.runtime.exists():
        parent = nearest_existing(place.runtime)
        if not os.access(parent, os.W_OK | os.X_OK):
            return Check(name, PROBLEM, f"{detail} cannot be made in {parent}", "set HOLDFAST_RUNTIME_DIR")
        return Check(name, GOOD, f"{detail} (made when needed)")
    found = place.runtime.lstat()
    if not private.is_private(found):
        what, remedy = private.shortcoming(found)
        return Check(name, PROBLEM, f"{detail} {what}", remedy)
    return Check(name, GOOD, f"{detail}, private")


def network(settings: Config, root: str) -> Check:
    """Return whether keepers of other nodes can reach the one here, and nobody else: a proved connection to ourselves."""
    settings_of = network_of(settings)
    if not settings_of.listen or settings_of.secret is None:
        return Check("network", GOOD, "nothing listens: keepers of this machine meet at their sockets")
    place = place_of(root, settings)
    credentials = Credentials(settings_of.secret, role=KEEPER, job=place.job, node=place.node)
    started = time.perf_counter()
    with tcp.listen(settings_of.listen) as listener, ThreadPoolExecutor(1) as pool:
        host, port = listener.getsockname()[:2]
        dialled = pool.submit(frames.connect, tcp.name(host, port), timeout_s=TRIAL_S, security=credentials)
        select.select([listener], [], [], TRIAL_S)
        server = frames.accept_tcp(listener)
        if server is not None:
            server.secure(credentials, server=True, timeout_s=TRIAL_S)
            server.close()
        dialled.result().close()
    milliseconds = (time.perf_counter() - started) * 1000
    detail = f"{settings_of.listen}: mutual TLS from the job's secret, proved in {milliseconds:.0f} ms"
    if is_everywhere(settings_of.listen):
        return Check("network", NOTE, detail, "every interface of this machine is listened on; give one address")
    if is_loopback(settings_of.listen):
        return Check("network", NOTE, detail, "only this machine can reach it; give the address that other nodes use")
    return Check("network", GOOD, detail)


def directory_checks(root: str) -> Iterator[Check]:
    """Check a root that is no bucket, as every command and every job would open it."""
    try:
        backend = open_backend(root)
    except HoldfastError as error:
        yield Check("path", PROBLEM, error.what, error.remedy)
        return
    yield from storage_checks(Path(backend.properties.where))


def storage_checks(root: Path) -> Iterator[Check]:
    """Check what a checkpoint path must be able to do."""
    try:
        place, owner = nearest_existing(root), ownership(root)
    except OSError as error:
        yield Check("path", PROBLEM, f"{root}: {error.strerror}", "give this user the right to look there")
        return
    yield owner
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        yield Check("rights", PROBLEM, f"{place} is not a writable directory", "give this user the right to write")
        return
    yield free_space(place)
    if root.is_dir() and (root / MARKER).is_file() and (root / TEMPORARY).is_dir():
        place = root / TEMPORARY
    with ExitStack() as stack:
        try:
            trial = tempfile.TemporaryDirectory(prefix=".holdfast-doctor-", dir=place, ignore_cleanup_errors=True)
            directory = Path(stack.enter_context(trial))
        except OSError as error:  # a full file system, or one that the kernel makes up
            remedy = translate(error, str(place)).remedy
            yield Check("rights", PROBLEM, f"nothing can be made in {place}: {error.strerror}", remedy)
            return
        yield tried("write and fsync", lambda: durable_write(directory))
        yield tried("create once", lambda: create_once(directory))
        yield tried("direct writes", lambda: direct_writes(directory))


def bucket_checks(url: str) -> Iterator[Check]:
    """Check what a bucket must be able to do. One object of our own is written and removed."""
    try:
        backend = open_backend(url)
        names = [name for name, _ in backend.listing("")]
    except HoldfastError as error:
        yield Check("bucket", PROBLEM, error.what, error.remedy)
        return
    if MARKER in names:
        try:
            read_job(backend)
        except HoldfastError as error:
            yield Check("path", PROBLEM, f"{url} cannot be opened: {error.what}", error.remedy)
            return
    if MARKER not in names and not NOT_FOREIGN.issuperset(names):
        yield Check("path", PROBLEM, f"{url} holds objects that are not ours ({names[0]})", "choose an empty prefix")
    else:
        yield Check("path", GOOD, f"{url} is {'a checkpoint directory' if MARKER in names else 'empty'}")
    yield tried("create once", lambda: bucket_create_once(backend))
    yield tried("write and read", lambda: bucket_round_trip(backend))


def bucket_create_once(backend: Backend) -> Check:
    """Return whether the store honours a conditional put."""
    backend.prepare()
    return Check("create once", GOOD, "a second creation of the same object is refused")


def bucket_round_trip(backend: Backend) -> Check:
    """A write, a ranged read of it, and its removal, timed."""
    directory = f"doctor-{secrets.token_hex(4)}"
    name, data = f"{directory}/trial", os.urandom(TRIAL_BYTES)
    started = time.perf_counter()
    try:
        backend.put(name, [memoryview(data)], stamp="doctor")
        written = time.perf_counter()
        found = bytearray(TRIAL_BYTES - 1)
        backend.read_into(name, memoryview(found), offset=1)
        done = time.perf_counter()
    finally:
        backend.delete(name)
    if found != data[1:]:
        return Check("write and read", PROBLEM, "other bytes came back than were written", "use another store")
    size = console.size_text(TRIAL_BYTES)
    detail = f"{size} written in {(written - started) * 1000:.0f} ms, read in {(done - written) * 1000:.0f} ms"
    return Check("write and read", GOOD, detail)


def nearest_existing(path: Path) -> Path:
    """`path`, or the nearest of its parents that exists."""
    return next(candidate for candidate in (path, *path.parents) if candidate.exists())


def ownership(root: Path) -> Check:
    """Return whether the path is new, ours, or somebody else's."""
    if not root.exists():
        if root.is_symlink():
            return Check("path", PROBLEM, f"{root} is a link that leads nowhere", "make what it names, or remove it")
        return Check("path", GOOD, f"{root} does not exist yet")
    if not root.is_dir():
        return Check("path", PROBLEM, f"{root} is not a directory", "choose another path")
    names = {f"{entry.name}/" if entry.is_dir() else entry.name for entry in root.iterdir()} - NOT_FOREIGN
    if MARKER in names:
        try:
            read_job(LocalBackend(root))
        except HoldfastError as error:
            return Check("path", PROBLEM, f"{root} cannot be opened: {error.what}", error.remedy)
    if MARKER in names or not names:
        return Check("path", GOOD, f"{root} is {'a checkpoint directory' if names else 'empty'}")
    return Check("path", PROBLEM, f"{root} holds files that are not ours ({min(names)})", "choose an empty directory")


def free_space(place: Path) -> Check:
    """Space that this user can still fill."""
    free = shutil.disk_usage(place).free
    state = GOOD if free >= LITTLE_SPACE_BYTES else NOTE
    remedy = "" if state == GOOD else "two versions of the whole state and one more must fit"
    return Check("free space", state, console.size_text(free), remedy)


def durable_write(directory: Path) -> Check:
    """The full write order of a checkpoint file, timed."""
    started = time.perf_counter()
    with mmap.mmap(-1, TRIAL_BYTES) as data:
        backend = LocalBackend(directory)
        backend.prepare()
        with memoryview(data) as view:
            backend.put("trial", [view], stamp="doctor")
    seconds = time.perf_counter() - started
    detail = f"{console.size_text(TRIAL_BYTES)} durable in {seconds * 1000:.0f} ms"
    return Check("write and fsync", GOOD, detail)


def create_once(directory: Path) -> Check:
    """Return whether of two committers with different contents one is refused."""
    backend = LocalBackend(directory)
    created = backend.create("once", b"first", stamp="doctor")
    repeated = backend.create("once", b"first", stamp="doctor")
    try:
        backend.create("once", b"second", stamp="doctor")
    except Fenced:
        if created and not repeated:
            return Check("create once", GOOD, "a second commit of the same version is refused")
    return Check("create once", PROBLEM, "two commits of one version both succeed", "use another file system")


def direct_writes(directory: Path) -> Check:
    """O_DIRECT costs a sixth of the CPU of the page cache; without it everything works, slower."""
    try:
        descriptor = os.open(directory / "direct", os.O_WRONLY | os.O_CREAT | os.O_DIRECT | os.O_CLOEXEC, 0o600)
    except OSError:
        return Check("direct writes", NOTE, "O_DIRECT is not possible here: writes go through the page cache")
    try:
        with mmap.mmap(-1, mmap.PAGESIZE) as page:
            os.pwrite(descriptor, page, 0)
    except OSError:
        return Check("direct writes", NOTE, "O_DIRECT refuses pages here: writes go through the page cache")
    finally:
        os.close(descriptor)
    return Check("direct writes", GOOD, "O_DIRECT works")
