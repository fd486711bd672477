"""The byte formats of images, values and strict JSON."""
