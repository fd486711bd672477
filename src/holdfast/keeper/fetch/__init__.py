"""Fetches bundles from other nodes and from storage."""
