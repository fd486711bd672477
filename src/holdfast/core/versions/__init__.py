"""The life of a version: slots, tables, commit, retention, and who writes it."""
