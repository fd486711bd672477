"""Commands on stored versions: list, verify, export, merge, remove."""
