"""Changes a run on purpose: faults, which must be detected, and stress, which must not change any bit."""
