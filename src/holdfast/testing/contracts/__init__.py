"""Contract suites: what anyone must be able to rely on who plugs something in. Public; they need no test framework."""
