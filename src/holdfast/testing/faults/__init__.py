"""Faults x phases: `holdfast drill faults` and the tests that run its cells."""
