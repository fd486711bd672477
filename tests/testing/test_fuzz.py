"""The fuzzers find what is planted, and nothing in the short run that every suite makes."""

from __future__ import annotations

import mmap
import random
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from fuzz.__main__ import Watched
from fuzz.child import LIMIT_S, NOW_BYTES, fuzz, inputs, judged
from fuzz.parsers import PARSERS
from holdfast.base import config
from holdfast.base.errors import ConfigError, CorruptError, UsageError
from holdfast.checkpoint.survivors import step_snapshot
from holdfast.cli import timeline
from holdfast.cli.planning import job_file
from holdfast.core.elastic.incident import from_facts
from holdfast.keeper.observe import run_summary
from holdfast.tiers.memory import memory_budget

DEEP = b"[" * 100_000


@pytest.mark.timeout(120)
def test_a_short_run_of_every_parser_finds_nothing() -> None:
    seen = Watched(list(PARSERS), seed=random.SystemRandom().randrange(10**6), seconds=0.1, cases=150, quiet=True)
    assert [(name, wrong, data.hex()) for name, wrong, data in seen.findings] == []
    assert seen.cases.keys() == PARSERS.keys()


@pytest.mark.parametrize("name", PARSERS)
def test_every_kept_input_is_answered_as_documented(name: str) -> None:
    parser = PARSERS[name]
    found = [wrong for data in parser.samples() if (wrong := judged(parser, data)[1])]
    assert not found
    assert judged(parser, parser.made()[0])[0].startswith("accepted")


def test_the_same_seed_makes_the_same_inputs() -> None:
    runs = []
    for seed in (1, 1, 2):
        source = inputs(PARSERS["values"], seed)
        data = [next(source)]
        for _ in range(200):
            data.append(source.send(judged(PARSERS["values"], data[-1])[0]))
        runs.append(data)
    assert runs[0] == runs[1] != runs[2]


def _raises(data: bytes) -> None:
    if b"1.5" not in data:
        raise KeyError("planted")


def _is_slow(_: bytes) -> None:
    end = time.process_time() + LIMIT_S + 0.2
    while time.process_time() < end:
        pass


def _forgets(data: bytes, value: object) -> None:
    assert not isinstance(value, dict), "does not come back"


@pytest.mark.parametrize(
    ("planted", "told"),
    [
        (replace(PARSERS["values"], read=_raises), "KeyError"),
        (replace(PARSERS["values"], read=_is_slow), "processor time"),
        (replace(PARSERS["values"], check=_forgets), "does not come back"),
        (replace(PARSERS["values"], errors=()), "CorruptError"),
    ],
)
def test_a_planted_fault_is_found(planted: object, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with tempfile.TemporaryFile() as file:
        file.truncate(NOW_BYTES)
        with mmap.mmap(file.fileno(), NOW_BYTES) as now:
            wrong = fuzz(planted, 1, seconds=30, cases=20 if told != "processor time" else 1, now=now)  # type: ignore[arg-type]
    assert wrong
    assert told in capsys.readouterr().out


# What the first runs found.


def test_settings_that_are_nested_without_end_are_a_clear_error(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_bytes(b"every = " + DEEP)
    with pytest.raises(ConfigError, match="not TOML"):
        config.load(environ={config.CONFIG_FILE_VARIABLE: str(file)})
    file.write_bytes(b"every = " + b"9" * 5000)
    with pytest.raises(ConfigError, match="not TOML"):
        config.load(environ={config.CONFIG_FILE_VARIABLE: str(file)})
    for number in (b"9" * 400, b"0x" + b"f" * 5000, b"[0x" + b"f" * 5000 + b"]"):
        file.write_bytes(b"linger_s = " + number)
        with pytest.raises(ConfigError, match="not a number"):
            config.load(environ={config.CONFIG_FILE_VARIABLE: str(file)})
    file.write_bytes(b"#" * (config.MAX_FILE_BYTES + 1))
    with pytest.raises(ConfigError, match="more than"):
        config.load(environ={config.CONFIG_FILE_VARIABLE: str(file)})


def test_a_description_with_an_endless_number_is_a_clear_error(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_bytes(b"ranks_per_node = " + b"9" * 5000)
    with pytest.raises(UsageError, match="describes no job"):
        job_file.load(file)


def test_a_journal_of_odd_lines_tells_what_it_can(tmp_path: Path) -> None:
    good = b'{"event": "progress", "t": 1.0, "step": 1}\n{"event": "progress", "t": 9.0, "step": 5}\n'
    odd = [DEEP, b'{"event": "progress"}', b'{"t": 1e400}', b'{"event": "progress", "t": 2, "spent": {"STEP": "x"}}']
    file = tmp_path / run_summary.NAME
    file.write_bytes(good + b"\n".join(odd))
    found = run_summary.RunFacts(file)()
    assert found is not None
    assert found["wall_s"] == 8.0


def test_a_track_of_an_endless_number_is_sorted(tmp_path: Path) -> None:
    (tmp_path / f"a{timeline.SUFFIX}").write_text(
        '{"track": "rank %s", "pid": 1, "wall": 1, "monotonic": 0}\n["x", 1, 2]\n' % ("9" * 5000)
    )
    assert len(timeline.read([tmp_path])) == 1


def test_an_incident_of_odd_nodes_is_told() -> None:
    assert from_facts({"nodes": 5}).nodes == ()


def test_a_ledger_of_odd_names_is_read_as_empty() -> None:
    assert memory_budget._parse(DEEP) == {}
    assert memory_budget._parse('{"a:\u00b2:1": 5}'.encode()) == {}
    assert memory_budget._parse(b'{"a:%s:1": 5}' % (b"9" * 5000)) == {}


def test_a_note_of_odd_rows_is_damaged() -> None:
    note = step_snapshot.StepSnapshot("j", 0, 1, msgspec.Raw(b"\x91\x01"), [], {})
    with pytest.raises(CorruptError):
        note.tensors()
