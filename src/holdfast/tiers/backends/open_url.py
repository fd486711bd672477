"""Leads from the name of a place to the backend behind it, with everything that is stacked around it: here and nowhere
else.

    a directory     LocalBackend                              an error there is final, see `posix_io`
    a bucket        Retrying(Limited(ObjectStoreBackend))     outermost first
"""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import urlsplit

from holdfast.base.errors import ConfigError
from holdfast.tiers.backends.concurrency_limit import Limited
from holdfast.tiers.backends.interface import Backend
from holdfast.tiers.backends.local import LocalBackend
from holdfast.tiers.backends.object_store import SCHEMES, open_bucket
from holdfast.tiers.backends.retry import Retrying

# Requests of one process that are under way: what is read side by side, and everything else.
MAX_REQUESTS = 64


def is_bucket(url: str) -> bool:
    """Return whether the place is in an object store."""
    scheme, mark, _ = url.partition("://")
    return bool(mark) and scheme in SCHEMES


def open_backend(url: str | Path) -> Backend:
    """The backend behind a path, a `file://` URL or a bucket's URL. Touches nothing yet.

    Raises:
        ConfigError: a scheme that this release does not know, a secret in the URL, a bucket without a name, or a path that no
            record can hold.
    """
    text = str(url)
    if not text.isprintable() and any("\ud800" <= letter <= "\udfff" for letter in text):
        raise ConfigError(
            "the path is not text in UTF-8", where=ascii(text), remedy="name it by a link, or another path"
        )
    if text.startswith("file://"):
        text = text.removeprefix("file://")
    if is_bucket(text):
        parts = urlsplit(text)
        if not parts.netloc or parts.query or parts.fragment or (parts.username and parts.scheme != "abfss"):
            remedy = "write scheme://bucket/prefix; credentials belong into the environment of the job"
            raise ConfigError(
                "this is not the address of a bucket and a prefix", where=text.split("?")[0], remedy=remedy
            )
        return Retrying(Limited(open_bucket(text), MAX_REQUESTS))
    if "://" in text or not text:
        remedy = "give a directory, a file:// URL, or s3://, gs://, az:// with bucket and prefix"
        raise ConfigError(f"{text!r} is not a place for checkpoints", remedy=remedy)
    return LocalBackend(Path(os.path.abspath(os.path.expanduser(text))))
