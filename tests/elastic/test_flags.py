"""The same flags to `holdfast run` and to torchrun: a worker finds the same, and the same lies on disk. Real launchers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import forked
from holdfast.base.errors import ConfigError, UsageError
from holdfast.elastic.launch import run_flags
from sample_kit import sampled

WORKER = Path(__file__).with_name("seen_worker.py")
TORCHRUN, OURS = "torch.distributed.run", "holdfast.elastic.launch.run_command"
# What differs by its nature: a port, a random directory, and who hosts the workers' store (the agent, on a port of each
# incarnation; torchrun's agent hosts none that its workers use where their stores are not to be shared).
DIFFERENT = {"MASTER_PORT", "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_USE_AGENT_STORE"}
FLAGS = (
    "--nproc-per-node=2",
    "--rdzv-backend=c10d",
    "--rdzv-endpoint=localhost:0",
    "--rdzv-id=same",
    "--max-restarts=2",
    "--role=painter",
    "--redirects=3",
    "--tee=1:1",
    "--duplicate-stdout-filters=said",
    "--signals-to-handle=SIGTERM",
)


class Seen:
    """What one launcher's workers told and left."""

    def __init__(self, home: Path, done: subprocess.CompletedProcess[str]) -> None:
        self.done = done
        self.facts: list[dict[str, Any]] = [
            json.loads(path.read_text()) for path in sorted((home / "out").glob("*.json"))
        ]
        # The first directory below has a random name.
        self.logs = {
            "/".join(path.relative_to(home / "logs").parts[1:]): path.read_text()
            for path in (home / "logs").rglob("*.log")
        }

    def lines(self) -> list[str]:
        """What the workers' words look like on the launcher's console."""
        return sorted(line for line in self.done.stdout.splitlines() if "said by rank" in line)


def launch(module: str, home: Path, *flags: str, first: tuple[str, ...] = (), by_name: bool = False) -> Seen:
    (home / "out").mkdir(parents=True)
    what = ["--module", WORKER.stem] if by_name else [str(WORKER)]
    command = [sys.executable, "-m", module, *flags, f"--log-dir={home / 'logs'}", *what, str(home / "out"), *first]
    environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "PYTHONPATH": str(WORKER.parent)}
    environment["TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"] = "<${role_name} ${rank}> "
    done = subprocess.run(command, env=environment, cwd=home, capture_output=True, text=True, timeout=100, check=False)
    return Seen(home, done)


@pytest.mark.slow
@pytest.mark.parametrize("by_name", [False, True])
def test_a_worker_finds_what_torchrun_gives_it(by_name: bool, tmp_path: Path, runtime_dir: Path) -> None:
    more = ("--virtual-local-rank", "--monitor-interval=0.05") if by_name else ()
    theirs = launch(TORCHRUN, tmp_path / "torchrun", *FLAGS, *more, by_name=by_name)
    ours = launch(OURS, tmp_path / "holdfast", *FLAGS, *more, by_name=by_name)
    for seen in (theirs, ours):
        assert seen.done.returncode == 0, seen.done.stderr[-3000:]
        assert len(seen.facts) == 2
    for mine, expected in zip(ours.facts, theirs.facts, strict=True):
        given = {
            name: value for name, value in expected["environment"].items() if name not in DIFFERENT and name != "PWD"
        }
        assert {name: mine["environment"].get(name) for name in given} == given
        assert mine["environment"].keys() >= DIFFERENT
        more_of_ours = mine["environment"].keys() - expected["environment"].keys()
        # The launcher has imported torch's compiler, which says there where it keeps what it compiles.
        assert all(name.startswith("HOLDFAST_") for name in more_of_ours - {"TORCHINDUCTOR_CACHE_DIR"}), more_of_ours
        assert (mine["name"], expected["name"]) == ("__main__", "__main__")
        assert mine["cwd"].replace("holdfast", "torchrun") == expected["cwd"]
        assert mine["path"].replace("holdfast", "torchrun") == expected["path"]
        assert [word.replace("/holdfast/", "/torchrun/") for word in mine["argv"]] == expected["argv"]
    assert ours.logs == theirs.logs
    assert len(ours.logs) >= 4
    assert ours.lines() == theirs.lines() == ["<painter 1> said by rank 1 in life 0"]


@pytest.mark.slow
def test_a_replacement_writes_logs_of_its_own_and_an_exit_code_is_told(tmp_path: Path, runtime_dir: Path) -> None:
    died = launch(OURS, tmp_path / "died", *FLAGS, first=("die",))
    assert died.done.returncode == 0, died.done.stderr[-3000:]
    assert died.logs["attempt_0/1/stdout.log"] == "said by rank 1 in life 0\n", "what the dead had said is lost"
    assert died.logs["attempt_0.1/1/stdout.log"] == "said by rank 1 in life 1\n"
    assert "<painter 1> said by rank 1 in life 1" in died.lines(), "it is followed like the first"
    left = launch(OURS, tmp_path / "left", *FLAGS, "--max-restarts=0", first=("leave",))
    assert left.done.returncode == 1
    assert "exitcode  : 7" in left.done.stderr


# A launcher on a node that has NVIDIA's driver, as far as the presets can tell.
WITH_DRIVER = """
import os, sys
from holdfast.checkpoint.device import accelerator as devices
from holdfast.elastic.launch import run_command as elastic
devices._PRESETS = {"/": devices._NCCL}
sys.exit(elastic.main())
"""


@pytest.mark.parametrize(
    ("mine", "flags", "found"),
    sampled(
        [("", (), "0"), ("3", (), "3"), ("", ("--watchdog=off",), "1"), ("3", ("--watchdog=off",), "3")],
        ("3", (), "3"), ("", ("--watchdog=off",), "1"),
    ),
)  # fmt: skip
def test_settings_of_the_users_are_never_overridden_and_none_is_made_without_a_watchdog(
    tmp_path: Path, mine: str, flags: tuple[str, ...], found: str
) -> None:
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    script = tmp_path / "script.py"
    script.write_text(f"import os, sys; open(sys.argv[1], 'w').write(os.environ[{name!r}])")
    environment = {**os.environ, **({name: mine} if mine else {}), "HOLDFAST_RUNTIME_DIR": str(tmp_path / "run")}
    command = [sys.executable, "-c", WITH_DRIVER, "--standalone", *flags, str(script), str(tmp_path / "found")]
    done = forked.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr[-2000:]
    assert (tmp_path / "found").read_text() == found


def test_jobs_that_were_given_no_id_have_different_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script may name files by it; the keeper of a job that is started again is found by `--run-id`."""
    monkeypatch.setattr(os, "environ", {**os.environ})
    told = []
    for words in ([], [], ["--standalone"], ["--rdzv-id=mine"]):
        args = run_flags.build_parser().parse_args([*words, "script.py"])
        run_flags.prepare(args)
        told.append(args.rdzv_id)
    assert len(set(told)) == 4
    assert told[-1] == "mine"
    assert all(len(each) == 36 for each in told[:-1])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--checkpoint-dir", "", __file__], "--checkpoint-dir is empty"),
        (["--checkpoint-dir= ", __file__], "--checkpoint-dir is empty"),
        (["no such script.py"], "there is no script no such script.py"),
    ],
)
def test_a_path_that_cannot_be_meant_is_refused_before_anything_starts(words: list[str], said: str) -> None:
    """`--checkpoint-dir "$ROOT"` with no ROOT ran a job that kept nothing, and said nothing."""
    with pytest.raises(UsageError, match=said):
        run_flags.check_names(run_flags.build_parser().parse_args(words))


@pytest.mark.parametrize("words", [["-m", "json.tool"], ["--no-python", "true"], ["-"], [__file__]])
def test_what_may_run_is_not_refused(words: list[str]) -> None:
    run_flags.check_names(run_flags.build_parser().parse_args(words))


@pytest.mark.parametrize(("flag", "value"), [("--redundancy", "parity:0"), ("--replicate-bandwidth", "much")])
def test_a_wrong_value_of_a_flag_without_a_variable_names_the_flag(
    flag: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    with pytest.raises(ConfigError) as told:
        run_flags.pass_on_settings(run_flags.build_parser().parse_args([flag, value, __file__]))
    os.close(int(Path(os.environ["HOLDFAST_CONFIG"]).name))  # settings that children would read
    assert told.value.where == flag


@pytest.mark.parametrize("secret", ["", "no such file", "open to others"])
def test_an_address_without_its_secret_is_told_by_the_launcher_once(
    secret: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every rank told it in a traceback, and was replaced twice for it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    (tmp_path / "open to others").write_text("ab" * 32)
    (tmp_path / "open to others").chmod(0o644)
    words = ["--listen", "127.0.0.1", *(["--secret-file", secret] if secret else []), __file__]
    with pytest.raises(ConfigError, match="secret"):
        run_flags.pass_on_settings(run_flags.build_parser().parse_args(words))
    os.close(int(Path(os.environ["HOLDFAST_CONFIG"]).name))
