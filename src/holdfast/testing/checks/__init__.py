"""Judges what a trial left: invariants, evidence, write order, damage."""
