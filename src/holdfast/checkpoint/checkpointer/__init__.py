"""The public Checkpointer and the session that it runs in a training process."""
