"""`holdfast run`: torchrun's engine that replaces only what failed, with a keeper beside it and an orderly end.

Takes every flag of torchrun with torchrun's meaning, plus the group "holdfast" (see `elastic.launch.run_flags`). Called as
`python -m holdfast.elastic.launch.run_command`. What it changes, and why:

- **Only the failed process is replaced** (`elastic.launch.agent`): workers are forked from a process that has torch imported
  (`elastic.processes.forkserver`), the others leave their broken groups and run the script again where they are (`elastic.worker.worker_main`).
  A command that is no Python script (`--no-python`, `--run-path`, `PYTHON_EXEC`, NUMA binding) is started and
  restarted by torchrun's own code.
- **A rendezvous store per incarnation.** By default the workers of all attempts share the agent's store, in which no
  key carries the attempt: restarted workers read addresses of the dead (stock torch 2.13: 2 of 10 restarts after a
  SIGKILL succeed). Here the leading agent opens a new one on a new port each time.
- **Restarts by default** (`--max-restarts`, 3 instead of 0): how many failures are mended. If nobody gives a number,
  ten minutes of health give all of them back.
- **A node that died is missed within seconds.** torchrun gives up a silent node after 15 s; see `run_flags.KEEP_ALIVE`. For a
  replacement in under 4 s on one machine: `--rdzv-conf keep_alive_interval=1,keep_alive_max_attempt=2`, a store that
  outlives every launcher (`is_host=0` and a `TCPStore` of the caller's own), and `--local-addr 127.0.0.<k>` with a k of
  its own for each simulated node: agents are ranked by address, then by process id, so only a replacement under the
  same address is sure to take the same ranks.
- **A signal to the launcher reaches the workers only, not their children** (data loaders), who are given time to save;
  exit code 0 if all of them end well, else 128 + signal. SIGINT or SIGQUIT after that ends them at once; another SIGTERM changes nothing.

Must never: keep state of the job, or be the reason that a run ends because the keeper could not start.
"""

from __future__ import annotations

import argparse
import atexit
import dataclasses
import functools
import logging
import os
import resource
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from torch._C._distributed_c10d import HashStore
from torch.distributed import DistError
from torch.distributed.elastic import events
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters
from torch.distributed.elastic.rendezvous import registry as rendezvous_registry
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler
from torch.distributed.launcher.api import LaunchConfig
from torch.distributed.run import config_from_args, get_args_parser
from torch.distributed.run import run as torchrun

from holdfast.base.config import DISABLE_VARIABLE, Config, disabled, unknown_variables
from holdfast.base.config import aliases as config_aliases
from holdfast.base.errors import HoldfastError, UsageError
from holdfast.base.process_label import label_process
from holdfast.base.program import command
from holdfast.base.standard_streams import open_standard_files
from holdfast.checkpoint.liveness.open_checkpointers import NO_WISH
from holdfast.core.model import Version
from holdfast.elastic.launch import foreign_launcher_env
from holdfast.elastic.launch.agent import NO_NODE_BACK, Agent
from holdfast.elastic.launch.agent_options import Program, Rules
from holdfast.elastic.launch.compile_cache import CompileCache, make_cache
from holdfast.elastic.launch.device_questions import asked_in_a_child
from holdfast.elastic.launch.foreign_launcher_env import Aliases
from holdfast.elastic.launch.keeper_hints import KeeperHints
from holdfast.elastic.launch.rendezvous.standby_store import any_calls
from holdfast.elastic.launch.rendezvous.store_failover import SILENT_S, MovingRendezvous, fall_silent
from holdfast.elastic.launch.run_flags import (
    ALONE,
    build_parser,
    check_names,
    check_numbers,
    is_given,
    limits_of,
    pass_on_settings,
    prepare,
)
from holdfast.elastic.processes import forkserver
from holdfast.elastic.processes.exit_guard import ExitGuard
from holdfast.elastic.processes.process_supply import ProcessSupply
from holdfast.elastic.watchdog.watchdog import directory_of, make_watch
from holdfast.elastic.worker import main_module, worker_main
from holdfast.elastic.worker.agent_channel import RunOrder
from holdfast.elastic.worker.run_leftovers import Look
from holdfast.keeper.rpc.spawn import ensure_keeper

logger = logging.getLogger(__name__)


MAX_DESCRIPTORS = 1 << 16
SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"  # torch's own default
# Behind the arguments of a launcher, and followed by a descriptor: be a fork server for it. No flag for people.
AS_FORKSERVER = "--as-forkserver-of-a-launcher"


@dataclasses.dataclass(frozen=True, slots=True)
class _Job:
    """A job as its command line describes it.

    Attributes:
        entrypoint: what torch starts, with `arguments`.
        program: the same, if it is a Python script or module of this interpreter.
        cache: of compiled code; None without one.
        found: what the environment says of the launcher that this one takes the place of.
    """

    args: argparse.Namespace
    settings: Config
    config: LaunchConfig
    entrypoint: Any
    arguments: list[str]
    program: Program | None
    cache: CompileCache | None
    found: Aliases


def main(
    argv: Sequence[str] | None = None,
    *,
    script: Callable[[RunOrder], None] = worker_main.run_script,
    looks: Sequence[Look] = (),
) -> int:
    """Runs the job; returns the exit code.

    Args:
        argv: the flags and the script; None: of this process.
        script: how a worker runs the script of an order.
        looks: what else a worker asks before it runs a script again in its process.
    """
    open_standard_files()
    _wait_for_children()
    logging.basicConfig(format="%(asctime)s %(name)s %(levelname)s %(message)s", level=logging.WARNING)
    work = functools.partial(worker_main.serve, script=script, looks=looks)
    given = list(sys.argv[1:] if argv is None else argv)
    if given[-2:-1] == [AS_FORKSERVER]:
        return forkserver.serve(int(given[-1]), work)
    try:
        if disabled():
            return _plain_torchrun(argv)
        found = foreign_launcher_env.read(config_aliases())
        for note in (*unknown_variables(), *found.notes):
            sys.stderr.write(f"holdfast run: {note}\n")
        if found.scheduler:
            return foreign_launcher_env.keep_store(found)
        job = _read_job(argv, found)
    except HoldfastError as error:
        sys.stderr.write(f"holdfast run: {error}\n")
        return 2
    if job.cache is not None:
        job.cache.fetch()
    label_process("hf-agent")
    # Before any thread exists; workers come out here with their exit code.
    forked = forkserver.ForkServer.start(work)
    _raise_descriptor_limit()  # of this process alone: workers have what the user gave them
    return _run_job(job, ProcessSupply(forked, _another_forkserver(given)))


def _read_job(argv: Sequence[str] | None, found: Aliases) -> _Job:
    parser = build_parser()
    parser.set_defaults(**found.defaults)
    args = parser.parse_args(argv)
    check_numbers(args)
    check_names(args)
    settings = pass_on_settings(args)
    prepare(args)
    config, entrypoint, arguments = _launch_config(args)
    program = _program(args, config)
    _check_version(args.from_version, program)
    cache = _cache(args.compile_cache, settings)
    return _Job(args, settings, config, entrypoint, arguments, program, cache, found)


def _run_job(job: _Job, supply: ProcessSupply) -> int:
    args, settings, cache = job.args, job.settings, job.cache
    if cache is not None:
        cache.start()
    early = start_keeper(args.checkpoint_dir, settings) if args.checkpoint_dir else KeeperHints()
    try:
        spec = _worker_spec(job.config, job.entrypoint, job.arguments, can_move=job.program is not None)
    except (RendezvousConnectionError, ValueError) as error:
        sys.stderr.write(_no_rendezvous(job.config.rdzv_endpoint, error))
        supply.close()
        if cache is not None:
            cache.close()
        return 1
    watch = make_watch(settings, args)
    agent = Agent(
        spec,
        job.config,
        supply=supply,
        program=job.program,
        num_spares=args.spares,
        watch=watch,
        rules=_rules(args, settings, job.config, early),
    )
    code = 1
    guard = ExitGuard(agent, _signals(job.config), grace_s=agent.grace_s, also_ends=lambda: [supply.forkserver.pid])
    try:
        code = guard.code = launch(agent, spec, job.config)
        if code == 0:
            foreign_launcher_env.tell_done(job.found)
        return code
    finally:
        supply.close()
        if cache is not None:
            cache.close()
        if watch is not None:
            watch.close(code)
        guard.close()


def _wait_for_children() -> None:
    """A caller that ignores SIGCHLD hands that on, and the kernel would tell nobody how a worker ended."""
    if signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def _cache(given: str | None, settings: Config) -> CompileCache | None:
    """The compile cache of this node, below the runtime directory."""
    directory, secret = directory_of(settings) / "compiled", settings.secret_file
    return make_cache(given, directory, os.environ, below=settings.runtime_path, secret_file=secret)


def _another_forkserver(argv: Sequence[str]) -> list[str]:
    """Return the command that starts a fork server for this launcher, but for the descriptor of its line."""
    spec = sys.modules["__main__"].__spec__
    return command(spec.name, *argv, AS_FORKSERVER) if spec is not None else []


def _raise_descriptor_limit() -> None:
    """A launcher needs some thirty descriptors for each rank, which is more than the usual soft limit on a large node."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (OSError, ValueError) as error:
            logger.info("the limit of %d descriptors stays: %s", soft, error)


def _plain_torchrun(argv: Sequence[str] | None) -> int:
    """HOLDFAST_DISABLE: torchrun itself with torchrun's defaults; our flags are read and mean nothing."""
    parser = build_parser()
    theirs = get_args_parser()
    parser.set_defaults(**{name: theirs.get_default(name) for name in ("max_restarts", "master_port")})
    sys.stderr.write(f"holdfast run: {DISABLE_VARIABLE} is set; this is plain torchrun\n")
    try:
        torchrun(parser.parse_args(argv))  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


def _program(args: argparse.Namespace, config: LaunchConfig) -> Program | None:
    """Return what workers run, if that is a Python script or module of this interpreter."""
    foreign = args.no_python or args.run_path or "PYTHON_EXEC" in os.environ or getattr(config, "numa_options", None)
    if foreign or getattr(args, "use_env", True) is False:
        return None
    # Of a pipe each reader would get a part, and a run after a failure nothing: an empty script ends well.
    text = None if args.module else main_module.read_once(args.training_script)
    arguments = (args.training_script, *args.training_script_args)
    return Program(arguments, is_module=args.module, text=(text or b"").decode("latin-1"))


def _check_version(text: str | None, program: Program | None) -> None:
    if text is None:
        return
    if Version.parse(text) is None:
        raise UsageError(f"{text!r} is not a version", remedy="`holdfast ls` shows them: i000001-s0000000120")
    if program is None:
        raise UsageError(
            "--from-version reaches Python scripts only", remedy='call restore(version="..") in the script'
        )


def _rules(args: argparse.Namespace, settings: Config, config: LaunchConfig, early: KeeperHints) -> Rules:
    # torchrun's 30 s would cut off a last save to slow storage.
    given = getattr(config, "shutdown_timeout", None) if is_given(args, "shutdown_timeout") else None
    return Rules(
        grace_s=settings.close_timeout_s if given is None else given,
        limits=limits_of(args),
        name=settings.node_label,
        node=settings.node,
        guard_s=args.guard_time,
        early=early,
        version=args.from_version or NO_WISH,
        exit_grace_s=args.exit_grace,
    )


def _launch_config(args: argparse.Namespace) -> tuple[LaunchConfig, Any, list[str]]:
    try:
        with asked_in_a_child():
            config, entrypoint, arguments = config_from_args(args)
    except (ValueError, AssertionError) as error:
        raise UsageError(str(error), remedy="see holdfast run --help") from error
    if not hasattr(config, "shutdown_timeout"):  # torch 2.10
        config.shutdown_timeout = args.shutdown_timeout
    if config.nproc_per_node < 1:
        given = args.nproc_per_node
        raise UsageError(
            f"--nproc-per-node={given} gives {config.nproc_per_node} processes", remedy="give a number of at least 1"
        )
    return config, entrypoint, arguments


def _signal_names(config: LaunchConfig) -> list[str]:
    """Return names of the signals that tell the launcher to end; not SIGHUP where `nohup` or a service manager has it ignored."""
    names = [name.strip() for name in str(getattr(config, "signals_to_handle", SIGNALS)).split(",")]
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [name for name in names if not (ignored and name == "SIGHUP")]


def _signals(config: LaunchConfig) -> list[int]:
    """Return the same as numbers."""
    found = (getattr(signal, name, None) for name in _signal_names(config))
    return [int(number) for number in found if isinstance(number, signal.Signals)]


def _program_name(spec: WorkerSpec) -> str:
    """Return what is said to have failed: the script rather than the interpreter that runs it."""
    program = str(spec.entrypoint)
    words = (str(word) for word in spec.args if not str(word).startswith("-")) if program == sys.executable else ()
    return next(iter(words), program)


def launch(agent: Agent, spec: WorkerSpec, config: LaunchConfig) -> int:
    """Runs one agent until the job ends on this node; returns the exit code.

    `torch.distributed.launcher.api.launch_agent` with our agent, which it cannot be given.
    """
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ",".join(_signal_names(config))
    close_rendezvous = False  # only a job that is over closes it: other nodes may go on without this one
    try:
        code = record(_run_agent)(agent, _program_name(spec), config) or 0
        close_rendezvous = True
        return code
    except ChildFailedError as error:
        sys.stderr.write(f"{error}\n")
        close_rendezvous = True
        return 1
    except HoldfastError as error:
        sys.stderr.write(f"holdfast run: {error}\n")
        return 1
    except RendezvousTimeoutError:
        sys.stderr.write(
            f"holdfast run: the other nodes did not come in time: {config.min_nodes} are needed; start them, or give more "
            "time (--rdzv-conf join_timeout=SECONDS; default: 600)\n"
        )
        return 1
    except RendezvousClosedError:
        sys.stderr.write("holdfast run: the job is over; to run it again, give all its launchers another --rdzv-id\n")
        return 1
    except DistError as error:
        if config.rdzv_backend != "static":
            raise
        sys.stderr.write(f"holdfast run: the host of the rendezvous is lost ({_cause(error)}): {NO_NODE_BACK}\n")
        return 1
    except SignalException as error:
        # Another node may still be at work, or this one may come back: the rendezvous stays open.
        return agent.exit_code_after(error.sigval)
    finally:
        agent.rest()  # what is left to do may take a while, as compiled code goes to storage
        if close_rendezvous:
            spec.rdzv_handler.shutdown()
        elif isinstance(spec.rdzv_handler, MovingRendezvous):
            spec.rdzv_handler.leave()
        else:
            fall_silent(spec.rdzv_handler, wait_s=SILENT_S)


def _run_agent(agent: Agent, name: str, config: LaunchConfig) -> int:
    result = agent.run()
    if result is None:
        return 0  # this node was not needed
    events.record(agent.get_event_succeeded(), config.event_log_handler)
    if result.is_failed():
        if not result.failures:
            return 1  # the job stopped because of another node, which tells why
        raise ChildFailedError(name=name, failures=result.failures)
    return 0


def _worker_spec(config: LaunchConfig, entrypoint: Any, args: Sequence[str], *, can_move: bool) -> WorkerSpec:
    endpoint = RendezvousParameters(
        backend=config.rdzv_backend,
        endpoint=config.rdzv_endpoint,
        run_id=config.run_id,
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        local_addr=config.local_addr,
        **config.rdzv_configs,
    )
    values = {f.name: getattr(config, f.name) for f in dataclasses.fields(WorkerSpec) if hasattr(config, f.name)}
    if config.rdzv_backend == "static":
        address, _, port = config.rdzv_endpoint.rpartition(":")
        values |= {"master_addr": address, "master_port": int(port)}
    values |= {
        "local_world_size": config.nproc_per_node,
        "entrypoint": entrypoint,
        "args": tuple(args),
        "rdzv_handler": MovingRendezvous(endpoint) if can_move and _over_tcp(endpoint) else _meeting(endpoint),
    }
    return WorkerSpec(**values)


def _meeting(params: RendezvousParameters) -> RendezvousHandler:
    """Return torch's rendezvous. A launcher that nobody can join, on one node and on no port, holds it in its own memory.

    Torch unpickles what stands in the store, and its store over TCP listens on all addresses, to every user of the machine.
    """
    alone = params.backend == "c10d" and params.max_nodes == 1 and params.endpoint == ALONE
    if not alone or params.get("store_type", "tcp") != "tcp":
        return rendezvous_registry.get_rendezvous_handler(params)
    store = HashStore()
    return create_handler(store, C10dRendezvousBackend(store, params.run_id), params)


def _no_rendezvous(endpoint: str, error: Exception) -> str:
    return (
        f"holdfast run: no rendezvous at {endpoint}: {_cause(error)}; give HOST:PORT of the first node (--rdzv-endpoint), and see that"
        " it runs and that its port can be reached from here\n"
    )


def _cause(error: Exception) -> str:
    return str(error.__cause__ or error).partition("\n")[0]


def _over_tcp(params: RendezvousParameters) -> bool:
    """Return whether several launchers meet in a store that one of them may host."""
    return params.backend == "c10d" and params.max_nodes > 1 and params.get("store_type", "tcp") == "tcp"


def start_keeper(root: str, settings: Config) -> KeeperHints:
    """Starts this node's keeper, so that it is there before the first rank looks; without it training goes on.

    Returns:
        What tells it that workers start.
    """
    try:
        return KeeperHints(ensure_keeper(root, settings), settings.ranks_per_reader)
    except HoldfastError as error:
        logger.warning("no keeper yet, the first rank will try again: %s", error)
        return KeeperHints()


def leave(code: int) -> NoReturn:
    """End the launcher with an exit code, also if a thread stands in a store that says nothing: Python's own end would abort."""
    if any_calls():
        atexit._run_exitfuncs()
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    leave(main())
