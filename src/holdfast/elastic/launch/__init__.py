"""The agent behind `holdfast run`."""
