"""Bytes: image format, memory slots, wire frames, storage; no torch and no decision that another file could want."""
