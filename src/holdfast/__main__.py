"""`python -m holdfast`: the command `holdfast`, where its script is not on the path."""

from __future__ import annotations

from holdfast.cli.cli import main

main()
