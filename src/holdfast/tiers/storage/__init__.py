"""Durable versions in storage: bundles, manifests, locks and keys."""
