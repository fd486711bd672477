"""Parts of the adapter for transformers, Accelerate and TRL: what their loaders, samplers and objects hold."""
