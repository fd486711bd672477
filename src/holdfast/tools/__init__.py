"""What a person looks at: the `holdfast` command, one file per family. No torch, so that answers come at once."""
