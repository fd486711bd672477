"""The `plan` command and its inputs and reports."""
