"""The crash drill: real processes are killed at random instants, and what is left is judged. See docs/drill.md."""
