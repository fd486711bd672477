"""The words that state is told in: entries, trees, shards, random generators."""
