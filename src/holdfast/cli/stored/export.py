"""`export`: a durable version as one file (or directory) that loads without holdfast and without knowing its layout.

The tensors are merged by `cli.stored.merge`, with bounded memory. safetensors is written right away, without torch; the
others are made of that by a program of the adapters' room, which maps it. Nothing is visible under the name that was
asked for before it is whole and synced; what is there is never replaced.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from holdfast.base import errors
from holdfast.base.errors import HoldfastError, StorageError, UsageError
from holdfast.base.events import Events
from holdfast.cli import console, subcommands
from holdfast.cli.stored import merge, versions
from holdfast.cli.stored.merge import Content
from holdfast.tiers.backends import posix_io
from holdfast.tiers.memory.processes import has_ended, machine_id
from holdfast.tiers.storage.version_store import open_storage

FORMS = ("safetensors", "torch", "dcp", "mindspore")
_MARK = ".partial"


def export(root: str, out: str, *, form: str, version: str | None, only: str, as_json: bool) -> int:
    """`holdfast export`; the exit code."""
    if form not in FORMS:
        raise UsageError(f"{form!r} is no format to export to", remedy=f"one of {', '.join(FORMS)}")
    target = Path(os.path.abspath(out))
    _refuse_existing(target)
    storage = open_storage(root, Events())
    manifest = storage.manifest(versions.choose(storage, version))
    content = merge.content_of(storage, manifest, only=only)
    progress = console.Progress(f"exporting {manifest.version}", merge.bytes_to_read(content))
    with _aside(target) as work:
        merged = work / (target.name if form == "safetensors" else "merged.safetensors")
        with merged.open("xb+") as file:
            merge.write_merged(storage, content, file.fileno(), progress.add)
        progress.close()
        made = merged if form == "safetensors" else _converted(form, merged, work / target.name)
        _publish(made, target)
    _tell(content, target, form, as_json=as_json)
    return console.GOOD


def _refuse_existing(target: Path) -> None:
    if os.path.lexists(target):
        raise UsageError("something is there already, and is not replaced", where=str(target), remedy="another name")
    if not target.parent.is_dir():
        raise UsageError("the directory to export into does not exist", where=str(target.parent), remedy="make it")


@contextmanager
def _aside(target: Path) -> Iterator[Path]:
    """A directory beside the target, for what is not whole yet; those that killed exports of this machine left are removed.

    One that bears this process's own number is of an earlier process: in containers numbers come again.
    """
    for old in target.parent.glob(f".{glob_escaped(target.name)}.*{_MARK}"):
        machine, _, pid = old.name.removesuffix(_MARK).rpartition(".")[2].partition("-")
        if machine == machine_id() and pid.isdigit() and (int(pid) == os.getpid() or has_ended(int(pid))):
            shutil.rmtree(old, ignore_errors=True)
    work = target.parent / f".{target.name}.{machine_id()}-{os.getpid()}{_MARK}"
    try:
        work.mkdir(mode=0o700)
    except OSError as error:
        raise StorageError(f"nothing can be written there: {error.strerror}", where=str(target.parent)) from error
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


def glob_escaped(name: str) -> str:
    """A file name in which nothing is a pattern."""
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)


def _converted(form: str, merged: Path, made: Path) -> Path:
    """The merged file in another format, by a program that may load torch."""
    answer = subcommands.ask("exported", [form, str(merged), str(made)])
    if not answer:
        raise StorageError(f"the program that writes {form} ended without an answer", where=str(made))
    told = json.loads(answer)
    if told["kind"]:
        kind = getattr(errors, told["kind"], HoldfastError)
        raise kind(told["what"], where=told["where"], remedy=told["remedy"])
    return made


def _publish(made: Path, target: Path) -> None:
    """Synced, then visible under its name, at once; a file only if nothing is there by now."""
    try:
        for path in (made, *made.rglob("*")) if made.is_dir() else (made,):
            _sync(path)
        if made.is_dir():
            _refuse_existing(target)
            os.rename(made, target)
        else:
            with _directory(made.parent) as here, _directory(target.parent) as there:
                if not posix_io.link(here, made.name, there, target.name, where=str(target)):
                    raise FileExistsError
        _sync(target.parent)
    except FileExistsError:
        raise UsageError("something is there by now, and is not replaced", where=str(target)) from None
    except OSError as error:
        raise StorageError(f"the export cannot be put in place: {error.strerror}", where=str(target)) from error


@contextmanager
def _directory(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY)
    try:
        yield fd
    finally:
        os.close(fd)


def _sync(path: Path) -> None:
    with _directory(path) as fd:
        os.fsync(fd)


def _tell(content: Content, target: Path, form: str, *, as_json: bool) -> None:
    document: dict[str, Any] = {
        "version": str(content.version),
        "to": form,
        "out": str(target),
        "tensors": len(content.tensors),
        "values": len(content.values),
        "bytes": content.num_bytes,
    }
    if as_json:
        console.print_json(document)
    else:
        size = console.size_text(content.num_bytes)
        console.say(f"{content.version}: {len(content.tensors)} tensors, {size}, as {form} in {target}")
