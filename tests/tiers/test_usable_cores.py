"""How many cores are used: those of the affinity, and no more than the quota of a container."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from holdfast.tiers.memory import page_populate
from holdfast.tiers.memory.usable_cores import usable_cores
from kit.control_groups import made_up


@pytest.fixture
def of_many_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(96)))


@pytest.mark.parametrize(
    ("cgroup", "files", "num_cores"),
    [
        ("0::/\n", {"cpu.max": "max 100000\n"}, 96),
        ("0::/\n", {}, 96),
        ("0::/\n", {"cpu.max": "400000 100000\n"}, 4),
        ("0::/\n", {"cpu.max": "150000 100000\n"}, 2),
        ("0::/\n", {"cpu.max": "20000 100000\n"}, 1),
        ("0::/a/b\n", {"a/cpu.max": "800000 100000\n", "a/b/cpu.max": "max 100000\n"}, 8),
        ("0::/../elsewhere\n", {"cpu.max": "300000 100000\n"}, 3),
        ("4:cpu,cpuacct:/x\n0::/\n", {"cpu/x/cpu.cfs_quota_us": "200000", "cpu/x/cpu.cfs_period_us": "50000"}, 4),
        ("4:cpu:/x\n0::/\n", {"cpu/x/cpu.cfs_quota_us": "-1", "cpu/x/cpu.cfs_period_us": "100000"}, 96),
        ("0::/\n", {"cpu.max": "nonsense\n"}, 96),
        ("0::/\n", {"cpu.max": "100000 0\n"}, 96),
    ],
)
def test_the_tightest_quota_counts(
    tmp_path: Path, of_many_cores: None, cgroup: str, files: dict[str, str], num_cores: int
) -> None:
    assert usable_cores(**made_up(tmp_path, cgroup, files)) == num_cores


def test_an_affinity_of_fewer_cores_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3})
    assert usable_cores(**made_up(tmp_path, "0::/\n", {"cpu.max": "400000 100000\n"})) == 1


@pytest.mark.parametrize(("usable", "threads"), [(96, 24), (4, page_populate.LEAST_THREADS), (1, 1)])
def test_a_keeper_of_a_small_container_has_few_threads(
    monkeypatch: pytest.MonkeyPatch, usable: int, threads: int
) -> None:
    monkeypatch.setattr(page_populate, "usable_cores", lambda: usable)
    assert page_populate.share_of_cores() == threads
