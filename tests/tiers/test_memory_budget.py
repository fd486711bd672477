"""The memory budget: what the kernel states, shared by keepers, refused with numbers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from holdfast.base.errors import MemoryRefused
from holdfast.tiers.memory import memory_budget
from holdfast.tiers.memory.memory_budget import Budget, Limits, allowed_bytes, read_limits
from holdfast.tiers.memory.processes import start_time, take_lock
from kit.control_groups import made_up

MIB = 1 << 20


def fake_system(base: Path, *, cgroup: str, files: dict[str, str]) -> Limits:
    places = made_up(base, cgroup, files)
    (base / "proc" / "meminfo").write_text("MemTotal: 8192 kB\nMemAvailable: 4096 kB\n")
    return read_limits(**places)


def test_the_machine_is_the_limit_where_there_is_no_cgroup(tmp_path: Path) -> None:
    assert fake_system(tmp_path, cgroup="0::/\n", files={"memory.max": "max"}) == Limits(8192 * 1024, 4096 * 1024, "/")


def test_the_tightest_cgroup_above_counts(tmp_path: Path) -> None:
    files = {
        "a/memory.max": str(2 * MIB),
        "a/memory.current": str(MIB),
        "a/memory.stat": f"inactive_file {MIB // 2}\n",
        "a/b/memory.max": "max",
    }
    limits = fake_system(tmp_path, cgroup="0::/a/b\n", files=files)
    assert limits == Limits(2 * MIB, 2 * MIB - MIB // 2, "/a/b")


def test_cgroup_v1(tmp_path: Path) -> None:
    files = {"memory/x/memory.limit_in_bytes": str(MIB), "memory/x/memory.usage_in_bytes": str(MIB // 4)}
    limits = fake_system(tmp_path, cgroup="4:memory:/x\n0::/\n", files=files)
    assert limits == Limits(MIB, MIB - MIB // 4, "/x")


def test_a_quarter_by_default_and_the_setting_otherwise() -> None:
    limits = Limits(100 * MIB, 50 * MIB, "/")
    assert allowed_bytes("", limits) == 25 * MIB
    assert allowed_bytes("60MiB", limits) == 60 * MIB


def test_reservations_add_up_and_come_back(tmp_path: Path) -> None:
    budget = Budget(tmp_path / "m", "10MiB")
    budget.reserve(6 * MIB, "slots")
    with pytest.raises(
        MemoryRefused, match=f"slots needs {5 * MIB} bytes; of {10 * MIB} allowed, {6 * MIB} are used"
    ) as refused:
        budget.reserve(5 * MIB, "slots")
    assert refused.value.remedy == f"set HOLDFAST_MEMORY_BUDGET to {11 * MIB} bytes or more"
    budget.release(3 * MIB)
    budget.reserve(5 * MIB, "slots")
    budget.close()
    assert not (tmp_path / "m").exists()


def test_keepers_of_one_cgroup_share_and_a_dead_one_gives_back(tmp_path: Path) -> None:
    code = f"""
import sys
from functools import partial
sys.path[:0] = {sys.path!r}
from pathlib import Path
from holdfast.tiers.memory import memory_budget
from holdfast.tiers.memory.memory_budget import Budget
Budget(Path({str(tmp_path / "m")!r}), "10MiB").reserve(6 << 20, "slots")
print("ok", flush=True)
sys.stdin.read()
"""
    other = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert other.stdin is not None
    assert other.stdout is not None
    assert other.stdout.readline() == b"ok\n"
    budget = Budget(tmp_path / "m", "10MiB")
    with pytest.raises(MemoryRefused, match=f"{6 * MIB} by other keepers"):
        budget.reserve(5 * MIB, "slots")

    other.kill()
    other.wait()
    other.stdin.close()
    other.stdout.close()

    budget.reserve(10 * MIB, "slots")
    budget.close()


def test_a_refusal_by_the_setting_reads_the_same_whatever_else_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An alarm with another text is told anew, and whoever asks again and again would flood every log."""
    budget, texts = Budget(tmp_path / "m", "10MiB"), set()
    for available in (50 * MIB, 51 * MIB):
        monkeypatch.setattr(memory_budget, "read_limits", partial(Limits, 100 * MIB, available, "/"))
        with pytest.raises(MemoryRefused) as refused:
            budget.reserve(11 * MIB, "parity")
        texts.add(str(refused.value))
    budget.close()
    assert len(texts) == 1


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"a:1:2": "x"}', b"\xff\xfe"])
def test_a_damaged_file_only_forgets(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "m").write_bytes(content)
    budget = Budget(tmp_path / "m", "10MiB")
    budget.reserve(MIB, "slots")
    assert list(json.loads((tmp_path / "m").read_bytes()).values()) == [MIB]
    budget.close()


def test_a_zombie_is_dead() -> None:
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    assert start_time(child) is None
    os.waitpid(child, 0)
    assert start_time(child) is None
    assert start_time(os.getpid()) is not None


def test_a_lock_on_a_removed_file_excludes_nobody(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    first = take_lock(path, blocking=False)
    assert first is not None
    assert take_lock(path, blocking=False) is None
    path.unlink()

    second = take_lock(path, blocking=False)

    assert second is not None
    os.close(first)
    assert take_lock(path, blocking=False) is None
    os.close(second)
