"""State of processes that survived a failure, and what may be taken from it."""
