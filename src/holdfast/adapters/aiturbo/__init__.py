"""What MindSpore calls when AITURBO=1."""
