"""Deliberate disturbances of a run: faults that must be detected, and stress that must not change any bit."""
