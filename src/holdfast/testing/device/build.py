"""Builds the native part of the simulated device with the compiler that is there, once per version of PyTorch and sources.

The result lies in the user's cache directory under a name made of all that it depends on. Processes that want it at the
same time wait for the one that builds; a build that was killed leaves nothing that would be taken for a result.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).resolve().parent / "native"
MODULE = "simulated_device_native"
# Hardly optimised: kernels are PyTorch's own code. Without it the build is as long and the host four times as slow.
FLAGS = ("-O1", "-g0", "-std=c++20", "-shared", "-fPIC", "-w", "-DUSE_DISTRIBUTED", f"-DSIMDEV_MODULE={MODULE}")


class BuildFailed(RuntimeError):
    """The compiler refused the sources. The message ends with what it said; nothing was written."""


def compiler() -> str | None:
    """Return the path of a C++ compiler: that of the environment's `CXX`, else g++, clang++ or c++; None without one."""
    names = (os.environ.get("CXX", ""), "g++", "clang++", "c++")
    return next((path for name in names if name and (path := shutil.which(name))), None)


def unavailable() -> str | None:
    """Return why the simulated device cannot be had here, in one line; None where it can."""
    if sys.platform != "linux":
        return "the simulated device needs Linux"
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        return "the simulated device needs Python's headers to be built"
    if compiler() is None and not library().exists():
        return "the simulated device needs a C++ compiler (g++ or clang++) to be built"
    return None


def cache_directory() -> Path:
    """Return where builds are kept: `simulated-device` in the user's cache directory."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "simulated-device"


def library() -> Path:
    """Return where the library for this Python, this PyTorch and these sources is, or will be."""
    known = hashlib.sha256()
    for said in (torch.__version__, str(torch.version.git_version), sys.version, *FLAGS):
        known.update(said.encode())
    for source in sorted(SOURCES.rglob("*.*")):
        known.update(str(source.relative_to(SOURCES)).encode() + source.read_bytes())
    return cache_directory() / f"torch-{torch.__version__}-{known.hexdigest()[:16]}" / f"{MODULE}.so"


def build() -> Path:
    """Return the library, building it first if it is not there: 20 to 60 s.

    Raises:
        BuildFailed: There is no compiler, or it refused.
    """
    target = library()
    if target.exists():
        return target
    if reason := unavailable():
        raise BuildFailed(reason)
    target.parent.mkdir(parents=True, exist_ok=True)
    with _lock(target.parent / "lock"):
        if not target.exists():
            _compile(target)
    return target


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold a lock that ends with this process."""
    with path.open("w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _compile(target: Path) -> None:
    began = time.monotonic()
    logger.info("building the simulated device for torch %s, once: under a minute", torch.__version__)
    with tempfile.TemporaryDirectory(dir=target.parent) as directory:
        fresh = Path(directory) / target.name
        command = _command(fresh)
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
        if answer.returncode != 0:
            raise BuildFailed(f"{' '.join(command)} ended with {answer.returncode}:\n{answer.stderr[:4000]}")
        os.replace(fresh, target)
    logger.info("built %s in %.0f s", target, time.monotonic() - began)


def _command(target: Path) -> list[str]:
    found = Path(torch.__file__).parent
    includes = (SOURCES, found / "include", found / "include" / "torch" / "csrc" / "api" / "include")
    return [
        str(compiler()),
        *FLAGS,
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *(f"-I{path}" for path in (*includes, sysconfig.get_paths()["include"])),
        str(SOURCES / "all.cpp"),
        "-o",
        str(target),
        f"-L{found / 'lib'}",
        *("-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"),
        f"-Wl,-rpath,{found / 'lib'}",
    ]
