"""Signs of life of a training process, and what of ours is open in it."""
