"""One framework per file; the only place where a framework's name may stand."""
