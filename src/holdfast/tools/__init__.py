"""The `holdfast` command: what a person looks at, one file per family. No torch, so that answers come at once."""
