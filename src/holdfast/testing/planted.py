"""Bugs."""
from __future__ import annotations
from holdfast.testing.drill_process import Setup
BUGS: dict = {}
def apply(name: str, role: str, setup: Setup) -> None:
    return
def trials(name, seed):
    return []
