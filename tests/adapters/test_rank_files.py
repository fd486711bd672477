"""Which file of a rank is believed: its proof must say the step of its name and the slices that are wanted.

One rank in this process; what eight ranks make of lost and damaged files is tests/checkpoint/test_strategies.py.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from holdfast.adapters.mindspore.rank_files import RankCheckpoints
from holdfast.adapters.mindspore.rank_proofs import Proof, read_proof
from holdfast.base.errors import CorruptError


class Twice(nn.Module):
    """Two weights, of which `columns` is what a layout would change."""

    def __init__(self, columns: int = 3) -> None:
        super().__init__()
        self.one, self.two = nn.Parameter(torch.zeros(2, columns)), nn.Parameter(torch.zeros(5))


def saved(home: Path, model: nn.Module, *values: float) -> RankCheckpoints:
    """Steps 1, 2, ... of epoch 1, with these numbers in all weights."""
    files = RankCheckpoints(home, {"model": model})
    for step, value in enumerate(values, 1):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(value)
        files.save(1, step)
    return files


def rename(home: Path, old: str, new: str) -> None:
    """The file and its proof under another step's name, in place of what was there."""
    for suffix in (".safetensors", ".proof"):
        source, target = (home / "rank_0" / f"checkpoint-{step}{suffix}" for step in (old, new))
        target.unlink(missing_ok=True)
        shutil.copy(source, target)


def test_a_file_under_another_steps_name_is_not_that_step(tmp_path: Path) -> None:
    saved(tmp_path, Twice(), 1, 2, 3)
    rename(tmp_path, "1_1", "1_3")
    model = Twice()
    assert RankCheckpoints(tmp_path, {"model": model}).recover() == (1, 2)
    assert {value for p in model.parameters() for value in p.flatten().tolist()} == {2}
    rename(tmp_path, "1_1", "1_2")
    (tmp_path / "rank_0" / "checkpoint-1_1.safetensors").unlink()
    with pytest.raises(CorruptError, match="it holds step 1 of epoch 1"):
        RankCheckpoints(tmp_path, {"model": model}).recover()


def test_a_file_with_other_slices_is_not_loaded(tmp_path: Path) -> None:
    saved(tmp_path, Twice(columns=4), 1)
    model = Twice()
    files = RankCheckpoints(tmp_path, {"model": model})
    with pytest.raises(CorruptError, match="other slices than this rank needs"):
        files.recover()
    assert not any(p.any() for p in model.parameters())
    saved(tmp_path, model, 7)
    again = Twice()
    assert RankCheckpoints(tmp_path, {"model": again}).recover() == (1, 1), "the later run's"
    assert (again.one == 7).all()


def test_a_file_without_its_proof_or_with_a_damaged_one_is_passed_over(tmp_path: Path) -> None:
    saved(tmp_path, Twice(), 1, 2, 3)
    (tmp_path / "rank_0" / "checkpoint-1_3.proof").unlink()
    proof = tmp_path / "rank_0" / "checkpoint-1_2.proof"
    proof.chmod(0o600)
    proof.write_bytes(proof.read_bytes()[:-9])
    model = Twice()
    assert RankCheckpoints(tmp_path, {"model": model}).recover() == (1, 1)
    assert (model.two == 1).all()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("suffix", [".safetensors", ".proof"])
@pytest.mark.parametrize("planted", ["endless", "pipe"])
def test_a_file_without_end_is_passed_over_unread(tmp_path: Path, suffix: str, planted: str) -> None:
    saved(tmp_path, Twice(), 1, 2)
    file = tmp_path / "rank_0" / f"checkpoint-1_2{suffix}"
    if planted == "endless":
        file.chmod(0o600)
        os.truncate(file, 1 << 40)
    else:
        file.unlink()
        os.mkfifo(file)
    model = Twice()
    assert RankCheckpoints(tmp_path, {"model": model}).recover() == (1, 1)
    assert (model.two == 1).all()


@pytest.mark.timeout(60)
def test_a_proof_that_says_more_than_its_slices_can_be_is_not_believed(tmp_path: Path) -> None:
    """Who can put an endless file there can write its proof too. It has no blocks on the disk, and would be read into memory."""
    saved(tmp_path, Twice(), 1, 2)
    file, proof = (tmp_path / "rank_0" / f"checkpoint-1_2{suffix}" for suffix in (".safetensors", ".proof"))
    said = msgspec.json.decode(proof.read_bytes(), type=Proof)
    for path in (file, proof):
        path.chmod(0o600)
    proof.write_bytes(msgspec.json.encode(msgspec.structs.replace(said, length=1 << 40)))
    os.truncate(file, 1 << 40)
    model = Twice()
    files = RankCheckpoints(tmp_path, {"model": model})
    assert files.recover() == (1, 1)
    (tmp_path / "rank_0" / "checkpoint-1_1.safetensors").unlink()
    with pytest.raises(CorruptError, match="its proof says 1099511627776 bytes"):
        files.recover()


PROOF = msgspec.json.encode(Proof(1, 2, "ab" * 16, 100, "cd" * 16, ("ef" * 16,), ("model.w",)))
CORPUS = [
    b"",
    b"null",
    b"[" * 100_000,
    b'{"a":' * 100_000,
    PROOF[:-1],
    PROOF + b"x",
    PROOF.replace(b"ef", b"\xd5]", 1),  # a string that is no UTF-8 once escaped out of msgspec as an error of its own
    PROOF.replace(b"model", b"\xff\xfe", 1),
    PROOF.replace(b"100", b"1e400"),
    PROOF.replace(b'"epoch":1', b'"epoch":"1"'),
    PROOF.replace(b'"epoch":1', b'"epoch":1,"more":2'),
]


def refused(directory: Path, data: bytes) -> bool:
    """Whether a proof is refused, and with the one error that a restore expects."""
    path = directory / "checkpoint-1_2.safetensors"
    path.with_suffix(".proof").write_bytes(data)
    try:
        return read_proof(path, (1, 2), "ab" * 16, 1 << 20) is None
    except CorruptError as error:
        return str(path) in error.where


@pytest.mark.parametrize("data", CORPUS, ids=range(len(CORPUS)))
def test_a_hostile_proof_is_refused_with_its_place(tmp_path: Path, data: bytes) -> None:
    assert refused(tmp_path, data)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_damaged_proofs_raise_nothing_else(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    damaged = bytearray(PROOF)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(damaged) - 1))
        piece = data.draw(st.one_of(st.binary(max_size=3), st.sampled_from([b"\xff", b"\xd5]", b"[", b"-1", b'"'])))
        damaged[at : at + data.draw(st.integers(0, 3))] = piece
    refused(tmp_path_factory.getbasetemp(), bytes(damaged))
