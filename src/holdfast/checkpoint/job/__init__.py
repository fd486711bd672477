"""The job around a training process: its ranks, its keeper, its slots and its storage."""
