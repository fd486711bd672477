"""A whole cluster in one process and in virtual time, on the real decision code; see `holdfast drill sim`."""
