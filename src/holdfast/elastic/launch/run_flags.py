"""The flags of `holdfast run`: torchrun's, the group "holdfast", and what they mean for the environment and the rendezvous.

Flags reach the workers through the environment, as settings do. What a user set explicitly stays.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import math
import os
import re
import uuid
from collections.abc import Sequence

from torch.distributed.run import get_args_parser, parse_min_max_nnodes

from holdfast.base.config import ENVIRONMENT, Config, disabled, hand_on, is_relative, load
from holdfast.base.errors import ConfigError, UsageError
from holdfast.core.elastic.escalation import Limits
from holdfast.core.elastic.node_lease import GUARD_S
from holdfast.core.elastic.watch_mode import CAREFUL, MODES
from holdfast.core.scheduling.cadence import Cadence
from holdfast.elastic.launch.agent_options import EXIT_GRACE_S
from holdfast.keeper.rpc.paths import absolute_root
from holdfast.keeper.rpc.spawn import network_of

logger = logging.getLogger(__name__)


class _DefaultNumber(int):
    """A number that nobody gave, though somebody may give the same one."""


DEFAULT_MAX_RESTARTS = _DefaultNumber(3)
# A node that sent no keep-alive for interval x attempts seconds is dead, and only then may another take its place.
# torchrun's 5 x 3 is meant for thousands of nodes that compare-and-set one key; small jobs can ask more often. kill -9
# of one of two nodes to the first steps with its replacement, 2 + 2 ranks on 2 cores, 2.7 s of it imports: 3.8 s with
# two attempts, 5.8 s with three, 8.2 s with five (torch 2.13). A node that is only slow and counted as dead goes on
# undisturbed until the next restart, at which it joins again. Each launcher judges by its own clock (`rendezvous.own_clock`).
KEEP_ALIVE = {"keep_alive_interval": "1", "keep_alive_max_attempt": "3"}
KEEP_ALIVE_MAX_NODES = 32
# Where a job of one node meets, as torchrun spells it; no other launcher could know the port.
ALONE = "localhost:0"

# Flag of ours -> field of the settings, passed on to the trainers through its environment variable.
PASSED_ON = {
    "--every": ("every", "captured cadence: steps (10), seconds (30s) or both (10,30s); default: every step"),
    "--overhead": (
        "overhead",
        "share of a step that captures may cost (0.5%%): saves as often as it allows; --every overrides",
    ),
    "--durable-every": ("durable_every", "durable cadence, same form; default: 60s"),
    "--memory-budget": (
        "memory_budget",
        "bytes that the keepers of this machine may use (4GiB); default: a quarter of the memory",
    ),
    "--node-label": ("node_label", "failure domain of these workers; default: the host name"),
    "--run-id": ("run_id", "tells jobs on one path apart; default: --rdzv-id if given, else 'default'"),
    "--runtime-dir": (
        "runtime_dir",
        "where sockets and logs of keepers live; default: a private directory of this user",
    ),
    "--listen": ("listen", "address of this machine for the keepers of other machines; needs --secret-file"),
    "--secret-file": ("secret_file", "the job's secret, the same on all machines: openssl rand -hex 32, mode 0600"),
    "--replicate-bandwidth": ("replicate_bandwidth", "bytes per second sent as replicas (500MB); default: no bound"),
    "--redundancy": (
        "redundancy",
        "what survives a lost node in memory: replica (default), parity:K (over K nodes or more), none",
    ),
    "--rack-label": ("rack_label", "where this node stands; replicas go to another rack"),
    "--backup-node": ("backup_node", "label of the node that keeps this one's replicas; default: holdfast chooses"),
    "--metrics-port": (
        "metrics_port",
        "port on loopback where the keeper serves metrics for Prometheus; default: none",
    ),
    "--trace": ("trace_dir", "write what ranks and keepers do into this directory, for `holdfast trace`"),
}


def build_parser() -> argparse.ArgumentParser:
    """The parser of torchrun with our defaults and our group of flags."""
    parser = get_args_parser()
    parser.prog = "holdfast run"
    parser.description = "torchrun with a keeper beside it: every flag of torchrun, and the group 'holdfast'."
    if "PET_MAX_RESTARTS" not in os.environ:
        parser.set_defaults(max_restarts=DEFAULT_MAX_RESTARTS)
    if "PET_MASTER_PORT" not in os.environ:
        parser.set_defaults(master_port=None)  # torch 2.10 has its number there, which then looks like a user's
    group = parser.add_argument_group("holdfast")
    with contextlib.suppress(argparse.ArgumentError):  # torchrun's own, but in torch 2.10
        group.add_argument(
            "--shutdown-timeout",
            "--shutdown_timeout",
            type=int,
            metavar="SECONDS",
            help="how long workers may take to save and end after SIGTERM (600), or because another one failed (30)",
        )
    group.add_argument(
        "--checkpoint-dir",
        metavar="ROOT",
        help="start this node's keeper for ROOT before the workers start; keep a script there that does not import holdfast, "
        "where that is safe, or say why not",
    )
    group.add_argument(
        "--spares",
        type=int,
        default=1,
        metavar="N",
        help="processes of this node that wait to replace a failed one (1)",
    )
    group.add_argument(
        "--watchdog",
        choices=(*MODES, "off"),
        default=CAREFUL.name,
        help="find workers that hang; careful (default): after minutes, and only on proof; quick: after seconds, for scripts "
        "whose ranks never pause; off: only those that end",
    )
    group.add_argument(
        "--guard-time",
        type=float,
        default=GUARD_S,
        metavar="SECONDS",
        help="how long a launcher waits for a silent one of the same --node-label before it takes its place (%(default).0f)",
    )
    group.add_argument(
        "--exit-grace",
        type=float,
        default=EXIT_GRACE_S,
        metavar="SECONDS",
        help="how long a worker may run exit handlers and threads after an error of its own; the others wait (%(default).0f)",
    )
    group.add_argument(
        "--compile-cache",
        metavar="URL|off",
        help="bring compiled code from there, and keep it there for the next start; off: neither",
    )
    for flag, (field, text) in PASSED_ON.items():
        group.add_argument(flag, dest=f"holdfast_{field}", metavar=field.upper(), help=text)
    group.add_argument(
        "--require-memory",
        action="store_true",
        help="refuse to start where there is no memory or no keeper for the level in memory; default: save to storage alone",
    )
    group.add_argument(
        "--expect-checkpoint",
        action="store_true",
        help="there is something to go on from: an empty checkpoint path is an error, not a start from nothing",
    )
    group.add_argument(
        "--from-version",
        metavar="VERSION",
        help="come back to this version at the start instead of the newest; what is newer is left behind. Once: the same "
        "command, started again, goes on from the newest, until there was a start without this flag",
    )
    return parser


def checkpoint_dir(argv: Sequence[str] | None = None) -> str:
    """Return what `--checkpoint-dir` says; empty where nothing can be read, which `main` then tells."""
    unheard = io.StringIO()
    try:
        with contextlib.redirect_stdout(unheard), contextlib.redirect_stderr(unheard):
            return absolute_root(str(build_parser().parse_known_args(argv)[0].checkpoint_dir or ""))
    except SystemExit:
        return ""


def limits_of(args: argparse.Namespace) -> Limits:
    """A number that somebody gave bounds the whole job; ours is given back by health."""
    return Limits(failures=args.max_restarts, renewed=isinstance(args.max_restarts, _DefaultNumber))


def is_given(args: argparse.Namespace, name: str) -> bool:
    """Return whether the user said so by a flag of torchrun, or by the variable that torchrun reads instead."""
    return getattr(args, name, None) is not None or f"TORCH_ELASTIC_{name.upper()}" in os.environ


def pass_on_settings(args: argparse.Namespace) -> Config:
    """Writes our flags into the environment that the workers inherit; returns the settings that result.

    Raises:
        UsageError: a flag, variable or settings file with a wrong value.
    """
    variables = {field: variable for variable, field in ENVIRONMENT.items()}
    handed: dict[str, str] = {}
    for field, _ in PASSED_ON.values():
        value = getattr(args, f"holdfast_{field}")
        if field == "overhead" and value is not None and args.holdfast_every is None:
            os.environ.pop(variables["every"], None)  # a flag is stronger than what the environment says of the same
        if value is not None and field in variables:
            os.environ[variables[field]] = value
        elif value is not None:
            handed[field] = value
    for field, wanted in (("require_memory", args.require_memory), ("expect_checkpoint", args.expect_checkpoint)):
        if wanted:
            handed[field] = "true"
    if handed or is_relative():  # workers may go to another directory before they read it
        os.environ.update([hand_on(handed)])
    if variables["run_id"] not in os.environ and args.rdzv_id not in ("", "none"):
        # A restarted job must find its keeper: the id is the user's own, never the random one of --standalone.
        os.environ[variables["run_id"]] = re.sub(r"[^A-Za-z0-9._-]", "-", args.rdzv_id)[:128]
    try:
        settings = load()
    except ConfigError as error:
        ours = (
            flag for flag, (field, _) in PASSED_ON.items() if field in handed and error.where.endswith(f": {field}")
        )
        raise ConfigError(error.what, where=next(ours, error.where), remedy=error.remedy) from None
    if variables["runtime_dir"] in os.environ:
        os.environ[variables["runtime_dir"]] = settings.runtime_dir
    _check_network(settings)
    for field in ("every", "durable_every"):
        _check_cadence(getattr(settings, field), variables[field] if variables[field] in os.environ else field)
    return settings


def _check_network(settings: Config) -> None:
    """An address without its secret is told here once, not by every rank after its start."""
    if not disabled() and not settings.secret_file.startswith("fd:"):  # who reads such a one takes it from the next
        network_of(settings)


def _check_cadence(text: str, where: str) -> None:
    """A wrong cadence is told here once, not by every rank after its start."""
    try:
        Cadence.parse(text)
    except ValueError as error:
        raise UsageError(str(error), where=where, remedy="give steps (10), seconds (30s) or both (10,30s)") from error


def check_numbers(args: argparse.Namespace) -> None:
    """Refuse numbers that no launcher can go by, before anything is started.

    Raises:
        UsageError: the flag with its number, and what is allowed.
    """
    for name in ("spares", "guard_time", "exit_grace", "shutdown_timeout"):
        value = getattr(args, name)
        if value is not None and not value >= 0:
            raise UsageError(
                f"--{name.replace('_', '-')}={value} is out of range", remedy="give a number of at least 0"
            )
    if not 0 < args.monitor_interval < math.inf:
        raise UsageError(f"--monitor-interval={args.monitor_interval} is out of range", remedy="give a number above 0")


def check_names(args: argparse.Namespace) -> None:
    """Refuse a checkpoint path and a script that cannot be meant, before anything is started.

    Raises:
        UsageError: the path is empty, as of a variable that is not set, or the script is not there.
    """
    if args.checkpoint_dir is not None and not args.checkpoint_dir.strip():
        raise UsageError(
            "--checkpoint-dir is empty, so nothing would be kept", remedy="give a path, or leave the flag out"
        )
    script = args.training_script
    if not (args.module or args.no_python or script == "-" or os.path.exists(script)):
        raise UsageError(f"there is no script {script}", remedy="correct the path; a module is named with -m")


def prepare(args: argparse.Namespace) -> None:
    """The environment and the rendezvous that restarts need; what the user set explicitly stays."""
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    _, max_nodes = _num_nodes(args.nnodes)
    single = max_nodes == 1 and args.rdzv_backend == "static" and not args.rdzv_endpoint and args.master_port is None
    if args.standalone or single:
        # As torchrun does: scripts name files by the id, and another job must not meet them. Ours is `--run-id`.
        args.rdzv_backend, args.rdzv_endpoint = "c10d", ALONE
        args.rdzv_id = args.rdzv_id if args.rdzv_id not in ("", "none") else str(uuid.uuid4())
    elif args.rdzv_backend == "static" and args.max_restarts > 0 and max_nodes > 1:
        logger.warning("the static rendezvous cannot bring a node back; use --rdzv-backend=c10d")
    if args.rdzv_backend == "c10d" and max_nodes <= KEEP_ALIVE_MAX_NODES:
        given = [part for part in args.rdzv_conf.split(",") if part]
        known = {part.split("=")[0].strip() for part in given}
        args.rdzv_conf = ",".join([*given, *(f"{k}={v}" for k, v in KEEP_ALIVE.items() if k not in known)])
    if args.master_port is None:
        args.master_port = 29500  # torchrun's own; only the static rendezvous uses it


def _num_nodes(text: str) -> tuple[int, int]:
    try:
        fewest, most = parse_min_max_nnodes(text)
        return int(fewest), int(most)
    except (ValueError, RuntimeError) as error:
        raise UsageError(f"--nnodes={text} is not MIN:MAX", remedy="give a number or MIN:MAX") from error
