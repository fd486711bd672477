"""Ranks that are granted no memory, or no keeper: what they save straight to storage is whole, in any layout."""

from __future__ import annotations

import pytest

from kit.layout_jobs import Jobs, hop, stored_bytes, whole


@pytest.mark.timeout(240)
def test_ranks_without_memory_write_one_copy_and_come_back_in_any_layout(
    jobs: Jobs,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with_memory = jobs.run("ddp", 2, nodes=2)
    monkeypatch.setenv("HOLDFAST_MEMORY_BUDGET", "8192")
    second = hop(jobs, with_memory, "ddp", 2, nodes=2)
    assert stored_bytes(jobs, second[0]["version"]) < 1.2 * stored_bytes(jobs, with_memory[0]["version"]), "one copy"
    assert "of 8192 allowed" in jobs.logs("job2"), "the log says why"
    third = hop(jobs, second, "fsdp", 2)
    monkeypatch.delenv("HOLDFAST_MEMORY_BUDGET")
    fourth = hop(jobs, third, "one", 1)
    assert whole(fourth, "restored") == whole(third)
