"""MindSpore's checkpoints, read into tensors and texts by name and written from them, in either of its two formats.

A name that ends in `.safetensors` is of that format, any other is `.ckpt`. What is written is durable, whole or not at
all, and then for reading only (0400), as MindSpore leaves it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from holdfast.adapters.mindspore.formats.ckpt import decode_ckpt, encode_ckpt
from holdfast.adapters.mindspore.formats.files import READ_ONLY, PathLike, read_file, replace_file
from holdfast.adapters.mindspore.formats.safetensors import decode_safetensors, encode_safetensors
from holdfast.adapters.mindspore.formats.tensors import Entry, EntryLike, HostTensor, as_entry
from holdfast.base.errors import UsageError

_SAFETENSORS = ".safetensors"
_WHAT = "checkpoint"


def load_checkpoint(
    path: PathLike, *, choice_func: Callable[[str], bool] | None = None, crc_check: bool = True
) -> dict[str, Entry]:
    """Return what a checkpoint holds, by name, in file order.

    Args:
        path: a `.ckpt` or `.safetensors` file; it is read into memory whole, and tensors are views of that.
        choice_func: which names are wanted; all by default.
        crc_check: check the CRC if the file says one.

    Raises:
        ValueError: no such file, or an empty one.
        CorruptError: not a checkpoint, or damaged.
        UsageError: it holds hash maps or a type that is not supported.
    """
    data, where = read_file(path, what=_WHAT), os.fspath(path)
    entries: Mapping[str, Entry]
    if _is_safetensors(path):
        entries = decode_safetensors(data, where, crc_check=crc_check)[0]
    else:
        entries = decode_ckpt(data, where, crc_check=crc_check)
    return {name: entry for name, entry in entries.items() if choice_func is None or choice_func(name)}


def save_checkpoint(
    save_obj: Mapping[str, EntryLike],
    path: PathLike,
    *,
    append_dict: Mapping[str, EntryLike] | None = None,
    crc_check: bool = False,
    remove_redundancy: bool | None = None,
) -> None:
    """Writes a checkpoint that MindSpore loads.

    Args:
        save_obj: `HostTensor`s, numpy arrays, numbers or texts by name.
        path: a `.ckpt` or `.safetensors` file; replaced if it is there.
        append_dict: more of the same (`epoch_num`, `step_num`, ...).
        crc_check: say a CRC-32 in the file.
        remove_redundancy: whether this rank saves only its share; noted in `.safetensors`.

    Raises:
        UsageError: a type that the format or MindSpore does not have; a name that is there twice.
    """
    twice = set(save_obj) & set(append_dict or ())
    if twice:
        raise UsageError(f"saved and appended under one name: {', '.join(sorted(twice))}")
    entries = {name: as_entry(value) for name, value in {**save_obj, **(append_dict or {})}.items()}
    if _is_safetensors(path):
        chunks = encode_safetensors(_only_tensors(entries), crc_check=crc_check, remove_redundancy=remove_redundancy)
    else:
        chunks = encode_ckpt(entries, crc_check=crc_check)
    replace_file(path, chunks, mode=READ_ONLY)


def convert_checkpoint(source: PathLike, target: PathLike, *, crc_check: bool = False) -> None:
    """Writes a checkpoint in the other format (or the same), by the two names; both ways, nothing is lost.

    Raises:
        UsageError: texts, which `.safetensors` cannot hold.
    """
    save_checkpoint(load_checkpoint(source), target, crc_check=crc_check)


def _is_safetensors(path: PathLike) -> bool:
    return os.fspath(path).endswith(_SAFETENSORS)


def _only_tensors(entries: Mapping[str, Entry]) -> dict[str, HostTensor]:
    texts = [name for name, entry in entries.items() if isinstance(entry, str)]
    if texts:
        what = f"safetensors holds no text: {', '.join(texts)}"
        raise UsageError(what, remedy="leave it out, or give the file a name in `.ckpt`")
    return {name: entry for name, entry in entries.items() if isinstance(entry, HostTensor)}
