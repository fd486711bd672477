"""Public kit: fault injection, invariants, contract suites, demo and drill; nothing below imports it."""
