"""The training state as users hand it over: models, optimizers, loaders and loop values."""
