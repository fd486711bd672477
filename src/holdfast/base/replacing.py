"""A file that is whole under its name, or as it was: made beside it, under a name that nobody knows before, then renamed.

In a directory where others may write, a known name may be a link that they made, or a pipe. A new file with a random name
is neither, and a rename takes the place of a link instead of following it.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Give a new file, which takes the place of `path` if the block ends well, and is removed otherwise.

    Raises:
        OSError: the directory refuses.
    """
    fresh = path.with_name(f".{path.name[:200]}.{secrets.token_hex(8)}.tmp")
    with fresh.open("xb") as file:
        try:
            yield file
            file.flush()
            os.replace(fresh, path)
        except BaseException:
            fresh.unlink(missing_ok=True)
            raise
