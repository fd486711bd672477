"""The demonstration: two simulated nodes, three faults, equal to the undisturbed run."""
