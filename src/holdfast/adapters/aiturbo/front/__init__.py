"""The folder that goes on PYTHONPATH for a MindSpore script with AITURBO=1: holds a package named `aiturbo`."""
