"""MindSpore's file formats."""
