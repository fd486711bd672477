"""`holdfast prove`: runs a script undisturbed and with kills, and compares every step of every optimizer."""
