"""Mutation testing of bitproof itself: faults are injected into cases; each must be detected, and its place blamed."""
