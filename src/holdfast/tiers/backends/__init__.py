"""Places that files are kept in: local directories and object storage."""
