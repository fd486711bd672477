"""The command as a whole: frozen options, no torch where one only looks, programs that take over the process."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main
from torch.distributed.run import get_args_parser

from cli.conftest import Run
from holdfast import testing
from holdfast.base.config import CONFIG_FILE_VARIABLE, DISABLE_VARIABLE, ENVIRONMENT, Config
from holdfast.base.errors import UsageError
from holdfast.cli import cli, subcommands
from holdfast.cli.cli import app
from holdfast.elastic.launch import run_flags
from sample_kit import sampled

FROZEN = Path(__file__).parent / "frozen_options.txt"

# Runs a command inside the interpreter and reports on standard error what it loaded and how long it took.
WATCHED = """
import sys, time
started = time.perf_counter()
from holdfast.cli.cli import main
sys.argv = ["holdfast", *sys.argv[1:]]
try:
    main()
except SystemExit:
    pass
loaded = [name for name in ("torch", "numpy") if name in sys.modules]
print(f"loaded={loaded} seconds={time.perf_counter() - started:.3f}", file=sys.stderr)
"""


def options() -> list[str]:
    """Every setting, variable and option there is, one per line."""
    lines = [f"setting {name}" for name in Config.__dataclass_fields__]
    lines += [f"variable {name}" for name in (*ENVIRONMENT, CONFIG_FILE_VARIABLE, DISABLE_VARIABLE)]
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        for parameter in command.params:
            lines.append(f"command {name} {' '.join(parameter.opts)}")
    own = set(run_flags.build_parser()._option_string_actions) - set(get_args_parser()._option_string_actions)
    lines += [f"command run {flag}" for flag in own]
    return sorted(lines)


def test_no_option_appears_or_vanishes_unnoticed() -> None:
    assert options() == FROZEN.read_text(encoding="utf-8").splitlines()


def test_the_package_runs_as_a_module(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "holdfast", "ls", str(tmp_path / "nothing")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, "HF302" in done.stderr) == (1, True), done.stderr


def test_options_stay_few() -> None:
    # 31: `expect_checkpoint` has to reach scripts that call restore() themselves, by whatever they are started.
    # 32: `encryption_required` is how a job that began without a key gets to one; refusing plain versions needs a way out.
    # 33: `redundancy` halves the memory of large states or takes more network; no default suits both.
    assert len(Config.__dataclass_fields__) <= 33
    # Beside them HOLDFAST_DISABLE, which is no setting: it must work where none can be read.
    assert len(ENVIRONMENT) + 1 <= 8


def test_every_command_but_run_speaks_json() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    silent = {name for name, command in commands.items() if "--json" not in [o for p in command.params for o in p.opts]}
    assert silent == {"run", "demo", "drill", "prove"}, "these are programs of their own, whose arguments are theirs"
    home = Path(testing.__file__).parent
    for program in (
        "demo/demo",
        "prove/prove",
        "drill/crash_drill",
        "power/power",
        "soak/soak",
        "faults/fault_drill",
        "simulator/__main__",
    ):
        assert 'add_argument("--json"' in (home / f"{program}.py").read_text(encoding="utf-8"), program


@pytest.mark.parametrize(
    "arguments",
    sampled([["status"], ["ls"], ["inspect"], ["verify"], ["doctor"], ["--help"]], ["verify"], ["doctor"]),
    ids=lambda a: a[0],
)
def test_commands_that_look_load_neither_torch_nor_numpy(
    arguments: list[str], checkpoint: Path, runtime_dir: Path, record_property: pytest.RecordProperty
) -> None:
    where = [] if arguments[0] in {"status", "--help"} else [str(checkpoint)]
    answer = subprocess.run(
        [sys.executable, "-c", WATCHED, *arguments, *where], capture_output=True, text=True, timeout=60
    )
    report = answer.stderr.splitlines()[-1]
    record_property("seconds", report.split("seconds=")[1])
    assert report.startswith("loaded=[]"), answer.stderr


def test_help_shows_examples(holdfast: Run) -> None:
    answer = holdfast("--help")
    assert answer.returncode == 0
    for command in ("run", "demo", "drill", "prove", "status", "ls", "inspect", "verify", "doctor"):
        assert f"  {command}" in answer.stdout
    assert "holdfast run --nproc-per-node 8 train.py" in answer.stdout


def test_run_takes_every_argument_as_it_is(holdfast: Run) -> None:
    answer = holdfast("run", "--help")
    assert answer.returncode == 0
    assert answer.stdout.count("usage:") == 1, "said once, though the arguments are looked at twice"
    for flag in ("--nproc-per-node", "--rdzv-endpoint", "--max-restarts", "--checkpoint-dir", "--node-label"):
        assert flag in answer.stdout


def test_status_without_a_keeper_is_good(holdfast: Run, runtime_dir: Path) -> None:
    answer = holdfast("status", "--json")
    assert answer.returncode == 0
    assert json.loads(answer.stdout) == {"keepers": [], "durable_only": []}


def test_status_tells_of_a_socket_that_nobody_serves(holdfast: Run, runtime_dir: Path) -> None:
    place = runtime_dir / "0123456789abcdef" / "node-a"
    place.mkdir(parents=True, mode=0o700)
    (place / "s").touch()
    answer = holdfast("status", "--json", "--runtime-dir", runtime_dir)
    (place / "s").unlink()
    assert answer.returncode == 1
    (keeper,) = json.loads(answer.stdout)["keepers"]
    assert (keeper["node"], keeper["alive"], keeper["error"]["code"]) == ("node-a", False, "HF503")


def test_a_demo_without_its_packages_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(subcommands.NEEDS, "demo", ("rich", "a_package_that_nobody_has"))
    with pytest.raises(UsageError, match="needs a_package_that_nobody_has") as told:
        subcommands.become("demo", [])
    assert told.value.remedy == "pip install a_package_that_nobody_has"


@pytest.mark.parametrize("command", ["run", "demo", "drill", "prove"])
def test_a_program_without_torch_is_an_error_and_no_traceback(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr(sys, "argv", ["holdfast", command, "--help"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert f"error HF100: `holdfast {command}` needs torch" in capsys.readouterr().err


def test_a_question_that_needs_torch_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(UsageError, match="needs torch"):
        subcommands.ask("exported", [])
