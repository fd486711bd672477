"""The trainer's side: live objects to versions and back, and the `Checkpointer`. Here torch is imported."""
