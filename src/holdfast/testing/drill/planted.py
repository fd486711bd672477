"""stub"""
from __future__ import annotations
BUGS: dict = {}
def apply(name: str) -> None: pass
def trials(name, seed): return []
