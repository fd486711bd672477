"""The package that MindSpore calls when AITURBO=1."""
