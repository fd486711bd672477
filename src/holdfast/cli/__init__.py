"""The `holdfast` command has one file per family of what a person looks at. It loads no torch, so that answers come at once."""
