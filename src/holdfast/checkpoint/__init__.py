"""The trainer's side: live objects to bundles and back, the `Checkpointer`, the launcher. Here torch is imported."""
