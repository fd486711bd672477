"""The soak on itself: a minute of it, and what it must not overlook."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from holdfast.testing.soak.soak import KINDS, Soak, SoakFailure, main, soak, too_fat

MIB = 1 << 20


def test_what_grows_is_told_and_what_breathes_is_not(tmp_path: Path) -> None:
    run = Soak(tmp_path, random.Random(0))
    for moment in range(400):
        run.samples.append(
            {
                "rank bytes": (300 + moment) * MIB,
                "keeper bytes": (300 + moment % 20) * MIB,
                "rank descriptors": 20 + moment,
            }
        )
    assert too_fat(run.grown()).keys() == {"rank bytes", "rank descriptors"}


def test_time_is_positive(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--minutes", "0"])
    assert stopped.value.code == 2
    assert "time is positive" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_rank_that_dies_in_a_healthy_oddity_is_told(tmp_path: Path) -> None:
    odd = tmp_path / "odd.py"
    odd.write_text("import os\nHEALTHY = {'dies': lambda _: os.kill(os.getpid(), 9)}\n")
    with pytest.raises(SoakFailure, match="did 'dies': the ranks were processes"):
        soak(tmp_path, minutes=0.1, every_s=1.0, seed=5, say=lambda _: None, oddities=odd)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_minute_of_faults_changes_no_bit_and_a_changed_bit_is_seen(tmp_path: Path) -> None:
    oddities = Path(__file__).parent.parent / "oddity_jobs.py"
    told = soak(tmp_path, minutes=1.0, every_s=5.0, seed=5, say=lambda _: None, oddities=oddities)
    assert sum(told["faults"].values()) >= 3
    assert told["oddities_lived"] == sum(told["faults"].values())
    assert set(told["faults"]) <= set(KINDS)
    steps = tmp_path / "steps-1"
    lines = steps.read_text().splitlines()
    number, digest, *rest = lines[len(lines) // 2].split()
    lines[len(lines) // 2] = " ".join([number, digest[::-1], *rest])
    steps.write_text("\n".join(lines) + "\n")
    with pytest.raises(SoakFailure, match="rank 1: 1 steps differ, 0 are missing"):
        Soak(tmp_path, random.Random(0)).judge()
