"""Every setting of holdfast: one frozen tree, one precedence (argument or flag > environment > TOML file > default).

This file is the only reader of the environment. Each field states its unit, its default and the reason for it. An
unknown key is an error that names the file and the key. The list of fields and variables is frozen by a test: a new
one needs a reason there.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import os
import re
import socket
import sys
import tempfile
from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.base.errors import ConfigError

# Environment variable -> field. At most eight.
ENVIRONMENT: dict[str, str] = {
    "HOLDFAST_EVERY": "every",
    "HOLDFAST_DURABLE_EVERY": "durable_every",
    "HOLDFAST_NODE_LABEL": "node_label",
    "HOLDFAST_RUN_ID": "run_id",
    "HOLDFAST_RUNTIME_DIR": "runtime_dir",
    "HOLDFAST_MEMORY_BUDGET": "memory_budget",
    "HOLDFAST_LOG_LEVEL": "log_level",
}
CONFIG_FILE_VARIABLE = "HOLDFAST_CONFIG"
# The switch. No field: it must work where no settings can be read, and a file must not be able to set it unnoticed.
DISABLE_VARIABLE = "HOLDFAST_DISABLE"
# Not ours: MindSpore's jobs name here where each rank writes who holds the same slices; ours write it too.
GROUP_INFO_VARIABLE = "GROUP_INFO_FILE"
# Nor are these: scripts that start MindSpore's dynamic cluster set them for each process; `holdfast run` takes them as
# defaults of its flags (elastic/launch/foreign_launcher_env.py).
ALIASES = (
    "MS_ROLE", "MS_WORKER_NUM", "MS_NODE_ID", "MS_SCHED_HOST", "MS_SCHED_PORT", "MS_ENABLE_RECOVERY", "MS_RECOVERY_PATH",
    "MS_COMPILER_CACHE_ENABLE", "MS_COMPILER_CACHE_PATH",
)  # fmt: skip

# Fields that name a file or a directory.
PATHS = ("runtime_dir", "secret_file", "encryption_key", "stop_file", "trace_dir")

LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]i?)?B?\Z", re.IGNORECASE)
_TIME = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h)\Z")
# What an address of 64 bits reaches at most.
MOST_BYTES = 1 << 62
# Of a rank: one is being written to storage, one holds the newest version, one is free for the next.
MAX_SLOTS = 3
_TIME_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The settings of one job on one node. A path is absolute from here on: a script may change its directory later.

    Attributes:
        every: captured cadence: steps (`"10"`) or seconds (`"30s"`); both may stand, steps win (`"10,30s"`). Default
            every step: with overlapped copying a capture costs less than the steps it saves.
        overhead: share of a step (`"0.5%"`) that captures may cost: the highest cadence that costs less is measured and
            used, from the cadence `every` on. `every`, given in the same place or a stronger one, overrides it.
        durable_every: durable cadence in the same form. Default `"60s"`: what one rank loses if all memory is lost.
        keep_last: durable versions kept; at least 2, for one may be bad. As many stay of every run that a fresh start on
            the same path ended, until `holdfast rm` removes them.
        keep_every: additionally keep the first version of so many steps (`"1000"`, counted as `every` counts them), or one
            of so many minutes (`"30m"`), or both; `"0"` keeps none.
        overlap: copy parameters and optimizer state behind the next forward and backward once proven safe.
        verify_capture: compare every byte of a late copy with a digest taken at the call, instead of some of each tensor.
            Doubles the memory traffic of a save.
        fence_timeout_s: how long an optimizer step may wait for the copy beyond the copy itself; then the version is
            abandoned. 1 s: a checkpoint library must never be the reason that training stops.
        begin_timeout_s: how long a save may wait for a free slot; then the version is left out. All waits of saves that are due
            by a cadence hold training up for three times that and 1 % of its time at most.
        num_slots: slots per rank, 2 or 3. Where saves come faster than storage takes them, a third is added later if
            `memory_budget` has room for three; with 3 it is there from the start, or the memory is refused.
        memory_budget: bytes (`"4GiB"`) that all keepers of the cgroup may use; `""` is a quarter of its limit.
        require_memory: refuse to start where the level in memory cannot be had (too little memory, no keeper); off: the
            job goes on with saves to storage alone, and says so.
        node_label: the failure domain of this process; `""` is the host name.
        run_id: tells jobs on the same path apart; part of the keeper's identity.
        runtime_dir: where sockets and logs of keepers live; `""` is `$XDG_RUNTIME_DIR/holdfast` or a private
            directory under the system's temporary one.
        linger_s: how long a keeper waits for a client before it ends; 10 minutes outlast a restart and a requeue.
        close_timeout_s: how long `close()` waits for the last save to be durable, and a restore for what it fetches or for a
            path that refuses; then it fails rather than takes an older version.
        expect_checkpoint: there is something to go on from: an empty path is an error and no fresh start.
        listen: address of this machine on which the keeper waits for those of other nodes; `""`: Unix sockets only, so
            that nothing listens unless it was asked for. Needs `secret_file`.
        listen_unsafe: an address of all interfaces (`0.0.0.0`) is meant.
        secret_file: the job's secret, 64 hexadecimal digits, equal on all nodes; a file of mode 0600, or `fd:<number>`.
        replicate_bandwidth: bytes per second (`"500MB"`) that this node sends as replicas; `""` is no bound.
        redundancy: how memory survives a lost node, the same on all nodes. `"replica"`: another node keeps a whole copy of what one
            node alone holds. `"parity:8"`: groups of 8 nodes or more keep parity of each other, in 1/7 of that memory; one
            node of a group may be lost. `"none"`: nothing is kept, and a version that one node alone holds is never replicated.
        rack_label: where this node stands; a replica never stands in the rack of its original. `""` is no rack.
        backup_node: label of the node that keeps this one's replicas; `""` lets holdfast choose.
        encryption_key: file with the key that bundle files in storage are encrypted with, or `!command` that prints it;
            64 hex digits. `""` writes them plain, as stock readers need them.
        encryption_required: with a key, whether versions that are not authenticated with it are refused; false as long as
            a job that began without a key has to come back from plain versions.
        ranks_per_reader: one node reads a bundle from storage for so many ranks that hold it; the others get it from
            that node. 512: one stream out of storage feeds them until its node is the bottleneck.
        metrics_port: port on loopback where the keeper serves its metrics for Prometheus; 0 serves none.
        stop_file: JSON file that asks the job to stop as SIGTERM does, with `{"stop": true}`; `""` is none.
        strict: restore refuses missing, unexpected and misshaped entries.
        trace_dir: where ranks and keepers write what they did and when, for `holdfast trace`; `""` writes nothing.
        log_level: level of the keeper's log: DEBUG, INFO, WARNING, ERROR or CRITICAL, in either case.
    """

    every: str = "1"
    overhead: str = ""
    durable_every: str = "60s"
    keep_last: int = 2
    keep_every: str = "0"
    overlap: bool = True
    verify_capture: bool = False
    fence_timeout_s: float = 1.0
    begin_timeout_s: float = 1.0
    num_slots: int = 2
    memory_budget: str = ""
    require_memory: bool = False
    node_label: str = ""
    run_id: str = "default"
    runtime_dir: str = ""
    linger_s: float = 600.0
    close_timeout_s: float = 600.0
    expect_checkpoint: bool = False
    listen: str = ""
    listen_unsafe: bool = False
    secret_file: str = ""
    replicate_bandwidth: str = ""
    redundancy: str = "replica"
    rack_label: str = ""
    backup_node: str = ""
    encryption_key: str = ""
    encryption_required: bool = True
    ranks_per_reader: int = 512
    metrics_port: int = 0
    stop_file: str = ""
    strict: bool = True
    trace_dir: str = ""
    log_level: str = "INFO"

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            text = os.fspath(value) if isinstance(value, os.PathLike) else value
            given = field.default if text is None else _typed(field.name, text, where=field.name)
            object.__setattr__(self, field.name, given)
        for name in PATHS:
            object.__setattr__(self, name, absolute(getattr(self, name)))
        _require(2 <= self.num_slots <= MAX_SLOTS, "num_slots", self.num_slots, f"2 or {MAX_SLOTS}")
        _require(self.keep_last >= 2, "keep_last", self.keep_last, "at least 2")
        _require(self.ranks_per_reader >= 1, "ranks_per_reader", self.ranks_per_reader, "at least 1")
        _require(0 <= self.metrics_port <= 65535, "metrics_port", self.metrics_port, "a port, or 0")
        for name in ("fence_timeout_s", "begin_timeout_s", "linger_s", "close_timeout_s"):
            _require(getattr(self, name) > 0, name, getattr(self, name), "a positive number of seconds")
        _require(bool(re.fullmatch(r"[A-Za-z0-9._-]{1,128}", self.run_id)), "run_id", self.run_id, "a plain name")
        for name in ("node_label", "rack_label", "backup_node"):
            text = getattr(self, name)
            plain = re.fullmatch(r"[A-Za-z0-9._-]{0,128}", text) and text not in {".", ".."}  # they name directories
            _require(bool(plain), name, text, "a plain name")
        known = re.fullmatch(r"replica|none|parity:(?:[3-9]|[1-9]\d{1,3})", self.redundancy)
        _require(
            bool(known), "redundancy", self.redundancy, "replica, none, or parity:K with at least 3 nodes in a group"
        )
        needs_replicas = bool(self.backup_node) and self.redundancy != "replica"
        _require(
            not needs_replicas,
            "backup_node",
            self.backup_node,
            "none where redundancy is not replica: it keeps replicas",
        )
        _require(self.log_level.upper() in LOG_LEVELS, "log_level", self.log_level, f"one of {', '.join(LOG_LEVELS)}")
        for name in ("memory_budget", "replicate_bandwidth"):
            parse_size(getattr(self, name) or "0", where=name)
        parse_share(self.overhead or "1%")

    @property
    def node(self) -> str:
        """The label of this node, never empty."""
        return self.node_label or re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname()) or "node"

    @property
    def runtime_path(self) -> Path:
        """The directory of sockets and logs; not created here."""
        if self.runtime_dir:
            return Path(self.runtime_dir)
        base = os.environ.get("XDG_RUNTIME_DIR")
        if base and _is_ours(base):
            return Path(base) / "holdfast"
        return Path(tempfile.gettempdir()) / f"holdfast-{os.getuid()}"


def _is_ours(directory: str) -> bool:
    """Returns whether nobody else may put anything there; under `sudo -E` the directory is another user's."""
    try:
        found = os.stat(directory)
    except OSError:
        return False
    return found.st_uid == os.geteuid() and not found.st_mode & 0o022 and os.access(directory, os.W_OK)


def absolute(path: str) -> str:
    """Return a path as every process of the job must name it: absolute, `~` as the user's home.

    What is none stays as it is: `""`, `fd:3` (a descriptor that is inherited), `!command` (which prints a key).
    """
    return path if not path or path.startswith(("fd:", "!")) else os.path.abspath(os.path.expanduser(path))


def load(overrides: Mapping[str, Any] | None = None, *, environ: Mapping[str, str] | None = None) -> Config:
    """The settings in force: defaults, then the TOML file, then the environment, then `overrides` that are not None.

    Raises:
        ConfigError: an unknown key, a value of the wrong type or out of range; names the place.
    """
    environ = os.environ if environ is None else environ
    values: dict[str, Any] = {}
    file = environ.get(CONFIG_FILE_VARIABLE, "")
    if file:
        values = over(values, _read_file(Path(file)))
    set_ = {name: _typed(name, environ[v], where=v) for v, name in ENVIRONMENT.items() if v in environ}
    given = {name: _typed(name, v, where="argument") for name, v in (overrides or {}).items() if v is not None}
    places = {name: f"{file}: {name}" for name in values}
    places |= {name: v for v, name in ENVIRONMENT.items() if v in environ}
    places |= dict.fromkeys(given, "argument")
    try:
        return Config(**over(over(values, set_), given))
    except ConfigError as error:
        raise ConfigError(error.what, where=places.get(error.where, error.where), remedy=error.remedy) from None


def unknown_variables(*, environ: Mapping[str, str] | None = None) -> list[str]:
    """Return for each variable that has a name of ours and means nothing what was probably meant. Never its value."""
    environ = os.environ if environ is None else environ
    known = [*ENVIRONMENT, CONFIG_FILE_VARIABLE, DISABLE_VARIABLE]
    fields = [field.name for field in dataclasses.fields(Config)]
    prefix = "HOLDFAST_"
    told = []
    for name in sorted(environ):
        if not name.startswith(prefix) or name in known:
            continue
        setting = name.removeprefix(prefix).lower()
        near = _nearest(name, known) if setting not in fields else ""
        if near:
            meant = f"write {near}"
        elif setting := _nearest(setting, fields):
            meant = f"the setting {setting} has no variable: write it into the file that {CONFIG_FILE_VARIABLE} names"
        else:
            meant = f"known: {', '.join(sorted(known))}"
        told.append(f"the variable {name} means nothing; {meant}")
    return told


def _nearest(name: str, known: Iterable[str]) -> str:
    """Return the known name that a misspelt one is nearest to; empty if none is near."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=0.8)), "")


def over(weaker: Mapping[str, Any], stronger: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of two places put together. A cadence is given or found: what is said last of either is meant."""
    values = {**weaker, **stronger}
    if "every" in stronger:
        values.pop("overhead", None)
    elif "overhead" in stronger:
        values.pop("every", None)
    return values


def disabled() -> bool:
    """Return whether holdfast is switched off altogether: nothing is restored, saved or watched, no keeper is started.

    Raises:
        ConfigError: the variable is neither true nor false.
    """
    text = os.environ.get(DISABLE_VARIABLE, "")
    try:
        return bool(text) and _boolean(text)
    except ValueError:
        raise ConfigError(
            f"{text!r} is neither true nor false", where=DISABLE_VARIABLE, remedy="set 1, or unset it"
        ) from None


def aliases(*, environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables of ALIASES that are set and not empty."""
    environ = os.environ if environ is None else environ
    return {name: environ[name] for name in ALIASES if environ.get(name)}


def group_info_file() -> str:
    """Return where this rank writes which ranks hold the same slices; `""` is nowhere."""
    return os.environ.get(GROUP_INFO_VARIABLE, "")


def is_restart() -> bool:
    """Tell if the launcher of this process has started the workers of its run before."""
    count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return count.partition(".")[0] not in ("", "0")


def launch() -> str:
    """Return the name that the launcher gave to this run; empty without a launcher."""
    return os.environ.get("TORCHELASTIC_RUN_ID", "")


def meeting_place() -> tuple[str, int]:
    """Return where ranks meet that no launcher of PyTorch started: MASTER_ADDR and MASTER_PORT, else one port above
    MindSpore's scheduler (MS_SCHED_HOST, MS_SCHED_PORT); port 0 if neither is set.
    """
    environ = os.environ
    if environ.get("MASTER_PORT", "").isdigit():
        return environ.get("MASTER_ADDR", "127.0.0.1"), int(environ["MASTER_PORT"])
    if environ.get("MS_SCHED_PORT", "").isdigit():
        return environ.get("MS_SCHED_HOST", "127.0.0.1"), int(environ["MS_SCHED_PORT"]) + 1
    return "", 0


def hand_on(overrides: Mapping[str, str], *, environ: Mapping[str, str] | None = None) -> tuple[str, str]:
    """A variable and its value that let children of this process read `overrides`, for settings without a variable.

    They stand in memory without a name, together with the settings file that was in force; it lasts as long as this
    process, and nobody has to remove it.
    """
    environ = os.environ if environ is None else environ
    file = environ.get(CONFIG_FILE_VARIABLE, "")
    values = over(_read_file(Path(file)) if file else {}, overrides)
    values |= {name: absolute(str(values[name])) for name in PATHS if name in values}
    if values.get("secret_file", "").startswith("fd:"):
        values["secret_file"] = _lasting(values["secret_file"])
    lines = [f"{name} = {json.dumps(value)}\n" for name, value in values.items()]
    return CONFIG_FILE_VARIABLE, _in_memory("".join(lines).encode())


def is_relative(*, environ: Mapping[str, str] | None = None) -> bool:
    """Return whether the settings file, or a path in it, means something else in another directory.

    Raises:
        ConfigError: as `load`.
    """
    file = (os.environ if environ is None else environ).get(CONFIG_FILE_VARIABLE, "")
    if not file:
        return False
    values = _read_file(Path(file))
    return not os.path.isabs(file) or any(
        absolute(str(values[name])) != values[name] for name in PATHS if name in values
    )


def _lasting(secret_file: str) -> str:
    """A name of a secret that children understand: a descriptor of ours is none of theirs."""
    try:
        return _in_memory(os.read(int(secret_file[3:]), 1024))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the job's secret: {error}", where=secret_file) from error


# As `_in_memory` names them: outlived by the name, and the number of a process comes again.
_HANDED_ON = re.compile(r"/proc/\d+/fd/\d+\Z")


def _in_memory(content: bytes) -> str:
    fd = os.memfd_create("holdfast-settings", os.MFD_CLOEXEC)
    os.fchmod(fd, 0o600)
    os.write(fd, content)
    return f"/proc/{os.getpid()}/fd/{fd}"


def parse_size(text: str, *, where: str = "") -> int:
    """Bytes from `"4GiB"`, `"500MB"` or `"1048576"`.

    Raises:
        ConfigError: not a size; `where` it was said.
    """
    remedy = 'write it as "4GiB", "500MB" or a number of bytes'
    match = _SIZE.match(text.strip())
    if not match:
        raise ConfigError(f"{text!r} is not a size", where=where, remedy=remedy)
    unit = (match[2] or "").lower()
    power = " kmgt".index(unit[0]) if unit else 0
    size = float(match[1]) * (1024 if unit.endswith("i") else 1000) ** power
    if size >= MOST_BYTES:
        raise ConfigError(f"{text[:60]!r} is more than any machine has", where=where, remedy=remedy)
    return int(size)


def parse_share(text: str) -> float:
    """A share between 0 and 1 from `"0.5%"` or `"0.005"`.

    Raises:
        ConfigError: not a share, or not between 0 and 1.
    """
    number, percent = (text.strip()[:-1], 100.0) if text.strip().endswith("%") else (text, 1.0)
    try:
        share = float(number) / percent
    except ValueError:
        share = math.nan
    if not 0.0 < share < 1.0:
        raise ConfigError(f"{text!r} is not a share of a step", where="overhead", remedy='write it as "0.5%"')
    return share


def overridden(config: Config | None, given: Mapping[str, Any]) -> Config:
    """The settings `config`, or those of file and environment, with what a caller gave; None is nothing given."""
    if config is None:
        return load(given)
    values: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    values.update((name, str(values[name])) for name in values.keys() & {"every", "durable_every"})
    if "every" in values:
        values["overhead"] = ""
    return dataclasses.replace(config, **values)


def parse_seconds(text: str) -> float:
    """Seconds from `"30s"`, `"5m"`, `"2h"` or `"250ms"`.

    Raises:
        ConfigError: not a duration.
    """
    match = _TIME.match(text.strip())
    if not match:
        raise ConfigError(f"{text!r} is not a duration", remedy='write it as "30s", "5m", "2h" or "250ms"')
    seconds = float(match[1]) * _TIME_UNITS[match[2]]
    if math.isinf(seconds):
        raise ConfigError(
            f"{text[:60]!r} is longer than can be counted", remedy='write it as "30s", "5m", "2h" or "250ms"'
        )
    return seconds


def _read_file(path: Path) -> dict[str, Any]:
    # Only here: most processes have no such file, and the parser's import is a tenth of their start.
    if sys.version_info >= (3, 11):
        import tomllib  # noqa: PLC0415
    else:
        import tomli as tomllib  # noqa: PLC0415
    try:
        with path.open("rb") as file:
            if _HANDED_ON.match(str(path)) and os.fstat(file.fileno()).st_uid not in {os.geteuid(), 0}:
                what = "the settings are another user's: the launcher that handed them on is gone"
                raise ConfigError(what, where=str(path), remedy=f"correct or unset {CONFIG_FILE_VARIABLE}")
            data = file.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise ConfigError(f"the settings file has more than {MAX_FILE_BYTES} bytes", where=str(path))
        table = tomllib.loads(data.decode())
    except OSError as error:
        raise ConfigError(
            f"cannot read the settings file: {error.strerror}",
            where=str(path),
            remedy=f"correct or unset {CONFIG_FILE_VARIABLE}",
        ) from error
    except (ValueError, RecursionError) as error:  # of numbers with too many digits too
        raise ConfigError(f"the settings file is not TOML: {error}", where=str(path)) from error
    return {name: _typed(name, value, where=f"{path}: {name}") for name, value in table.items()}


# What stands there may be a secret by mistake.
_UNTOLD = {"encryption_key", "secret_file"}


def _typed(name: str, value: Any, *, where: str) -> Any:
    fields = {f.name: f for f in dataclasses.fields(Config)}
    if name not in fields:
        near = _nearest(name, fields)
        remedy = f"write {near}" if near else f"known: {', '.join(sorted(fields))}"
        raise ConfigError(f"unknown setting {name!r}", where=where, remedy=remedy)
    kind: Any = type(fields[name].default)
    try:
        if kind is bool:
            return _boolean(value)
        if kind is str and isinstance(value, int | float):
            return str(value)
        if not isinstance(value, kind | str | int):
            raise ValueError
        return kind(value)
    except (ValueError, OverflowError):
        told = name if name in _UNTOLD else f"{name} = {_spelt(value)}"
        raise ConfigError(f"{told} is not {_KINDS[kind]}", where=where) from None


def _spelt(value: object) -> str:
    """Returns a value for an error: Python spells no number of more than 4,300 digits, nor what holds one."""
    try:
        return repr(value)[:80]
    except ValueError:
        return f"a {type(value).__name__} of very many digits"


# No file of settings is so long; one that is would be read, and parsed, without end.
MAX_FILE_BYTES = 1 << 20

_KINDS = {bool: "true or false", str: "text", int: "a whole number", float: "a number"}


def _boolean(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    known = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    if str(value).lower() not in known:
        raise ValueError(value)
    return known[str(value).lower()]


def _require(condition: bool, name: str, value: object, wanted: str) -> None:
    if not condition:
        raise ConfigError(f"{name} = {value!r} is out of range", where=name, remedy=f"give {wanted}")


def variables() -> MutableMapping[str, str]:
    """Return the variables of this process, for who carries those that a script changes."""
    return os.environ
