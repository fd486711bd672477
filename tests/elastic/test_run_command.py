"""`holdfast run`: one process is replaced, nodes are, signals leave time to save. Real processes."""

from __future__ import annotations

import functools
import json
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from torch.distributed import TCPStore
from torch.distributed.run import get_args_parser

from holdfast.base.config import Config, load
from holdfast.base.errors import ConfigError
from holdfast.elastic.launch import run_command, run_flags
from holdfast.elastic.launch.keeper_hints import KeeperHints
from launch_kit import Job, kill_tree, wait_for


def living(processes: list[psutil.Process]) -> Iterator[psutil.Process]:
    for process in processes:
        try:
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                yield process
        except psutil.NoSuchProcess:
            pass  # it ended this moment


def spares(launcher: subprocess.Popen[str]) -> list[int]:
    """Processes that wait to replace a failed one, oldest first."""
    family = psutil.Process(launcher.pid).children(recursive=True)
    return sorted(process.pid for process in living(family) if process.name() == "hf-spare")


def survive_kills(job: Job, kills: int, *, ranks: int = 4) -> None:
    flags = ("--standalone", f"--nproc-per-node={ranks}", "--max-restarts=20", "--spares=2")
    launcher = job.launch(*flags, fresh=True)
    seen: set[int] = set()
    chooser = random.Random(7)
    rows = job.running(ranks)
    waiting = wait_for(lambda: found if len(found := spares(launcher)) == 2 else None, "two spares", job.logs)
    for kill in range(1, kills + 1):
        victim = chooser.randrange(ranks)
        os.kill(rows[victim][0], signal.SIGKILL)
        # Two failures may follow each other at once; after that the job has to make progress, seconds of it.
        before, rows = rows, job.recovered(ranks, kill, steps=10 if kills <= 2 else 350)
        seen |= {pid for pid, _, _ in before}
        # Gloo may let a wait go on for ever that began in the moment of the kill; who stands in one is replaced, and it is said.
        gone = {
            before[victim][0],
            *map(int, re.findall(r"process (\d+) stands in a wait that nothing ends", job.logs())),
        }
        assert {old[0] for new, old in zip(rows, before, strict=True) if new[0] != old[0]} <= gone, job.logs()
        assert rows[victim][0] not in seen
        assert rows[victim][0] in waiting or kill > 2, "a spare was there and did not take the rank"  # type: ignore[operator]
    job.stop()
    assert launcher.wait(60) == 0, job.logs()


def test_only_the_killed_process_is_replaced_and_the_others_keep_theirs(job: Job) -> None:
    survive_kills(job, 2)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_job_survives_ten_killed_workers(job: Job) -> None:
    survive_kills(job, 10)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_eight_ranks_survive_killed_workers(job: Job) -> None:
    survive_kills(job, 3, ranks=8)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("count", [10, 50])
def test_every_restart_by_torchruns_own_path_comes_back(job: Job, count: int) -> None:
    """Workers that are programs of their own: a failure restarts all of them, by torch's code, over a new store."""
    flags = ("--standalone", "--nproc-per-node=2", f"--max-restarts={count}", "--no-python", sys.executable)
    launcher = job.launch(*flags)
    rows = job.running(2)
    for kill in range(count):
        seen = {pid for pid, _, _ in rows}
        os.kill(rows[kill % 2][0], signal.SIGKILL)
        rows = job.running(2, since=seen)
        assert {restarts for _, restarts, _ in rows} == {kill + 1}
    job.stop()
    assert launcher.wait(60) == 0, job.logs()


@pytest.mark.slow
def test_a_lost_node_is_replaced_and_keeps_its_ranks(job: Job) -> None:
    """Both nodes once: kill -9 of a launcher with its workers, then a new launcher under the same address."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def start(node: int) -> subprocess.Popen[str]:
        return job.launch(
            "--nnodes=2",
            "--nproc-per-node=2",
            "--rdzv-backend=c10d",
            "--rdzv-id=replaced",
            f"--rdzv-endpoint=127.0.0.1:{store.port}",
            "--rdzv-conf=is_host=0,keep_alive_interval=1,keep_alive_max_attempt=2",
            f"--local-addr=127.0.0.{node + 1}",
            f"--node-label=node{node}",
        )

    nodes = [start(0), start(1)]
    rows = job.running(4)
    for kill, victim in enumerate((1, 0), 1):
        kill_tree(nodes[victim])
        nodes[victim] = start(victim)
        before, rows = rows, job.recovered(4, kill)
        assert [new[0] == old[0] for new, old in zip(rows, before, strict=True)] == [r // 2 != victim for r in range(4)]
    assert [psutil.Process(pid).parents()[1].pid for pid, _, _ in rows] == [n.pid for n in nodes for _ in range(2)]
    job.stop()
    assert [node.wait(60) for node in nodes] == [0, 0], job.logs()


@pytest.mark.slow
@pytest.mark.parametrize("also", ["", "the fork server is killed", "the workers are frozen"])
def test_no_worker_outlives_its_launcher(job: Job, also: str) -> None:
    """A worker of a launcher that is gone could neither be replaced nor fenced by anybody. It ends by itself, without the
    fork server too; and the fork server ends what cannot.
    """
    launcher = job.launch("--standalone", "--nproc-per-node=2", worker=("--with-child",))
    rows = job.running(2)
    family = psutil.Process(launcher.pid).children(recursive=True)
    assert {pid for pid, _, _ in rows} < {process.pid for process in family}
    names = {process.pid: Path(f"/proc/{process.pid}/comm").read_text().strip() for process in family}
    assert [names[pid] for pid, _, _ in rows] == ["hf-rank-0", "hf-rank-1"], "an operator could not tell them apart"
    assert "hf-forkserver" in names.values()
    launcher.send_signal(signal.SIGSTOP)  # it must not see what becomes of the others
    for process in family:
        if also == "the fork server is killed" and names[process.pid] == "hf-forkserver":
            process.kill()
        if also == "the workers are frozen" and process.pid in {pid for pid, _, _ in rows}:
            process.suspend()
    launcher.kill()
    wait_for(lambda: not [p for p in family if p.is_running() and p.status() != "zombie"], "their end", job.logs)


def test_sigterm_leaves_time_to_save_and_spares_the_workers_children(job: Job) -> None:
    launcher = job.launch("--standalone", "--nproc-per-node=2", worker=("--save-on-sigterm", "--with-child"))
    rows = job.running(2)
    launcher.terminate()
    assert launcher.wait(60) == 0, job.logs()
    assert [(job.directory / f"saved{rank}").exists() for rank in range(2)] == [True, True]
    assert [(job.directory / f"child{rank}").read_text() for rank in range(2)] == ["alive", "alive"]
    assert not [pid for pid, _, _ in rows if psutil.pid_exists(pid)]


@pytest.mark.slow
def test_sigterm_to_workers_that_do_not_save_is_not_success(job: Job) -> None:
    launcher = job.launch("--standalone", "--nproc-per-node=2", worker=("--alone",))
    job.running(2)
    launcher.terminate()
    assert launcher.wait(60) == 128 + signal.SIGTERM


def _is_past(job: Job, step: int) -> bool:
    return (job.ranks(1) or [(0, 0, 0)])[0][2] > step


@pytest.mark.slow
def test_sigint_ends_what_does_not_listen_and_another_sigterm_does_not(job: Job) -> None:
    launcher = job.launch("--standalone", "--nproc-per-node=1", worker=("--alone", "--ignore-sigterm"))
    ((pid, _, step),) = job.running(1)
    for after in (step + 20, step + 60):  # schedulers repeat it, with time left: that shortens nothing
        launcher.terminate()
        wait_for(functools.partial(_is_past, job, after), "the worker going on", job.logs)
    launcher.send_signal(signal.SIGINT)
    assert launcher.wait(20) == 128 + signal.SIGTERM
    assert not psutil.pid_exists(pid)


def test_a_failing_script_is_restarted_and_then_reported(job: Job) -> None:
    launcher = job.launch("--standalone", "--max-restarts=1", worker=("--alone",))
    first = job.running(1)
    os.kill(first[0][0], signal.SIGKILL)
    second = job.running(1, since={first[0][0]})
    os.kill(second[0][0], signal.SIGKILL)
    assert launcher.wait(60) == 1
    assert "Signal 9 (SIGKILL)" in job.logs()
    assert "rank 0 killed by signal 9 (SIGKILL): replace" in job.logs()


@pytest.mark.slow
def test_a_script_that_failed_and_does_not_end_is_ended_and_its_own_error_is_told(job: Job) -> None:
    launcher = job.launch("--standalone", "--max-restarts=0", "--exit-grace=3", worker=("--alone", "--fail-slowly"))
    assert launcher.wait(60) == 1
    assert "first error: rank 0 on" in job.logs()
    assert "ZeroDivisionError: planted" in job.logs().split("first error")[1]


def test_a_checkpoint_directory_brings_the_keeper_before_the_workers(job: Job, runtime_dir: Path) -> None:
    root = job.directory / "checkpoints"
    launcher = job.launch("--standalone", f"--checkpoint-dir={root}", "--node-label=n1", worker=("--alone",))
    job.running(1)
    look = [sys.executable, "-m", "holdfast.cli.cli", "status", "--json"]
    (keeper,) = json.loads(subprocess.run(look, capture_output=True, text=True, timeout=60).stdout)["keepers"]
    assert (keeper["node"], keeper["alive"]) == ("n1", True)
    assert psutil.Process(keeper["status"]["pid"]).ppid() != launcher.pid
    job.stop()
    assert launcher.wait(60) == 0, job.logs()
    psutil.Process(keeper["status"]["pid"]).terminate()  # nobody ever came, so it would linger


def test_wrong_flags_are_usage_errors(job: Job) -> None:
    launchers = [job.launch(flag) for flag in ("--no-such-flag", "--nnodes=some", "--every=often")]
    assert [launcher.wait(60) for launcher in launchers] == [2, 2, 2]


@pytest.mark.parametrize(
    "flag", ["--monitor-interval=0", "--monitor-interval=nan", "--exit-grace=nan", "--guard-time=-1", "--spares=-2"]
)
def test_numbers_that_no_launcher_can_go_by_are_refused(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command.main([flag, "train.py"]) == 2
    assert f"{flag.split('=', maxsplit=1)[0]}=" in capsys.readouterr().err


def test_a_launcher_tells_variables_that_mean_nothing_and_where_a_cadence_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOLDFAST_DURABLE_EVERY", "often")
    monkeypatch.setenv("HOLDFAST_DISABLED", "1")
    assert run_command.main([__file__]) == 2
    said = capsys.readouterr().err
    assert said.count("the variable HOLDFAST_DISABLED means nothing; write HOLDFAST_DISABLE\n") == 1
    assert "'often'" in said
    assert "[HOLDFAST_DURABLE_EVERY]" in said


def test_every_flag_of_torchrun_is_taken() -> None:
    def flags(parser: object) -> set[str]:
        return set(parser._option_string_actions)  # type: ignore[attr-defined]

    assert flags(get_args_parser()) <= flags(run_flags.build_parser())
    script = ["--nproc-per-node", "2", "train.py", "--every", "its own"]
    assert run_flags.build_parser().parse_args(script).training_script_args == ["--every", "its own"]


def test_a_torchrun_that_has_no_time_to_end_and_a_port_of_its_own_changes_no_flag(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """That of torch 2.10: every job of one node met at port 29500, and nobody could say how long workers may take to end."""

    def older() -> Any:
        parser: Any = get_args_parser()
        parser.set_defaults(master_port=29500)
        for flag in ("--shutdown-timeout", "--shutdown_timeout"):
            parser._option_string_actions.pop(flag, None)
        return parser

    config = SimpleNamespace(nproc_per_node=1)
    monkeypatch.setattr(run_flags, "get_args_parser", older)
    monkeypatch.setattr(run_command, "get_args_parser", older)
    monkeypatch.setattr(run_command, "config_from_args", lambda args: (config, args.training_script, []))
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    args = run_flags.build_parser().parse_args(["--shutdown-timeout=7", "script.py"])
    run_flags.prepare(args)
    assert (args.rdzv_backend, args.rdzv_endpoint) == ("c10d", run_flags.ALONE)
    found, *_ = run_command._launch_config(args)
    assert run_command._rules(args, load(environ={}), found, KeeperHints()).grace_s == found.shutdown_timeout == 7
    told: list[Any] = []
    monkeypatch.setattr(run_command, "torchrun", told.append)
    assert run_command._plain_torchrun(["script.py"]) == 0
    assert told[0].master_port == 29500, "of plain torchrun"


def test_our_flags_are_passed_on_to_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOLDFAST_EVERY", "HOLDFAST_NODE_LABEL", "HOLDFAST_RUN_ID"):
        monkeypatch.setenv(name, "replaced")
        monkeypatch.delenv(name)
    args = run_flags.build_parser().parse_args(
        ["--every", "5", "--node-label", "n7", "--rdzv-id", "job/42", "train.py"]
    )
    settings = run_flags.pass_on_settings(args)
    assert (settings.every, settings.node_label, settings.run_id) == ("5", "n7", "job-42")
    assert os.environ["HOLDFAST_EVERY"] == "5"


def test_an_agent_goes_by_the_flags_and_settings_of_its_launcher() -> None:
    args = run_flags.build_parser().parse_args(["--guard-time", "7", "--max-restarts", "5", "train.py"])
    config, early = run_command._launch_config(args)[0], KeeperHints()
    rules = run_command._rules(args, Config(node_label="n7", close_timeout_s=77.0), config, early)
    assert (rules.guard_s, rules.limits.failures, rules.name, rules.grace_s) == (7.0, 5, "n7", 77.0)
    assert rules.early is early


def test_flags_without_a_variable_reach_the_workers_beside_the_users_settings(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    mine = tmp_path / "mine.toml"
    mine.write_text('keep_last = 5\nlisten = "10.0.0.1"\n')
    secret = tmp_path / "secret"
    secret.touch(0o600)
    secret.write_text("ab" * 32)
    monkeypatch.setenv("HOLDFAST_CONFIG", str(mine))
    with secret.open() as opened:
        flags = ["--listen", "127.0.0.1", "--secret-file", f"fd:{opened.fileno()}", "--rack-label", "r1", "train.py"]
        run_flags.pass_on_settings(run_flags.build_parser().parse_args(flags))
    ask = (
        "from holdfast.base.config import load; from holdfast.keeper.rpc.spawn import network_of; c = load(); "
        "n = network_of(c); print(c.keep_last, c.rack_label, n.listen, n.secret.hex() == 'ab' * 32)"
    )
    answer = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True, timeout=60).stdout
    assert answer.split() == ["5", "r1", "127.0.0.1", "True"]
    for path in (load().secret_file, os.environ["HOLDFAST_CONFIG"]):  # they last as long as the launcher
        os.close(int(path.rpartition("/")[2]))


@pytest.mark.parametrize(
    ("file", "variable", "flags", "found"),
    [
        ("", "", ["--overhead", "0.5%"], ("0.5%", "1")),
        ('every = "7"', "", ["--overhead", "0.5%"], ("0.5%", "1")),
        ("", "7", ["--overhead", "0.5%"], ("0.5%", "1")),
        ("", "", ["--overhead", "0.5%", "--every", "3"], ("", "3")),
        ('overhead = "2%"', "7", [], ("", "7")),
        ('overhead = "2%"\nevery = "7"', "", [], ("", "7")),
    ],
)
def test_a_cadence_is_given_or_found_and_the_stronger_word_counts(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    file: str,
    variable: str,
    flags: list[str],
    found: tuple[str, str],
) -> None:
    mine = tmp_path / "mine.toml"
    mine.write_text(file)
    monkeypatch.setenv("HOLDFAST_CONFIG", str(mine))
    monkeypatch.setenv("HOLDFAST_EVERY", variable)
    if not variable:
        monkeypatch.delenv("HOLDFAST_EVERY")
    settings = run_flags.pass_on_settings(run_flags.build_parser().parse_args([*flags, "t.py"]))
    assert (settings.overhead, settings.every) == found
    assert load() == settings, "the workers read the same"
    handed = os.environ["HOLDFAST_CONFIG"]
    if handed != str(mine):
        os.close(int(handed.rpartition("/")[2]))


def test_a_share_is_a_share() -> None:
    assert load({"overhead": "0.5%"}, environ={}).overhead == "0.5%"
    for text in ("much", "0%", "100%", "-1%", "nan"):
        with pytest.raises(ConfigError, match="share of a step"):
            load({"overhead": text}, environ={})


def test_a_run_id_from_outside_wins_over_the_rendezvous(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_RUN_ID", "mine")
    assert run_flags.pass_on_settings(run_flags.build_parser().parse_args(["--rdzv-id", "x", "t.py"])).run_id == "mine"
    monkeypatch.setenv("HOLDFAST_RUN_ID", "not / plain")
    with pytest.raises(ConfigError):
        run_flags.pass_on_settings(run_flags.build_parser().parse_args(["t.py"]))


@pytest.mark.parametrize(
    ("flags", "conf"),
    [
        (["--standalone"], "keep_alive_interval=1,keep_alive_max_attempt=3"),
        (["--nnodes=4", "--rdzv-backend=c10d", "--rdzv-conf=keep_alive_interval=9"], "keep_alive_interval=9,keep_alive_max_attempt=3"),
        (["--nnodes=1:500", "--rdzv-backend=c10d"], ""),
        (["--nnodes=2", "--master-port=1234"], ""),
    ],
)  # fmt: skip
def test_small_jobs_miss_a_dead_node_sooner(flags: list[str], conf: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    args = run_flags.build_parser().parse_args([*flags, "train.py"])
    run_flags.prepare(args)
    assert args.rdzv_conf == conf


def test_a_job_of_one_node_meets_in_no_store_that_others_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch unpickles what stands in a rendezvous' store, and over TCP every user of the machine reaches it."""

    def listening() -> set[int]:
        found = psutil.Process().net_connections("inet")
        return {each.fd for each in found if each.status == psutil.CONN_LISTEN}

    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    args = run_flags.build_parser().parse_args(["--nproc-per-node=1", "script.py"])
    run_flags.prepare(args)
    config, entrypoint, arguments = run_command._launch_config(args)
    before = listening()
    handler = run_command._worker_spec(config, entrypoint, arguments, can_move=True).rdzv_handler
    assert handler is not None
    try:
        for _ in range(2):  # as at a restart
            info = handler.next_rendezvous()
            assert (info.rank, info.world_size) == (0, 1)
            assert listening() == before
    finally:
        handler.shutdown()


def test_a_number_of_failures_that_somebody_gave_is_never_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def limits(*flags: str) -> tuple[int, bool]:
        found = run_flags.limits_of(run_flags.build_parser().parse_args([*flags, "t.py"]))
        return found.failures, found.renewed

    assert limits() == (3, True)
    assert limits("--max-restarts=3") == (3, False), "the same number, but given"
    assert limits("--max-restarts=0") == (0, False)
    monkeypatch.setenv("PET_MAX_RESTARTS", "7")
    assert limits() == (7, False)
