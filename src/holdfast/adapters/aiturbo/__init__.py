"""Holds what MindSpore calls when AITURBO=1."""
