"""Measurements of a run besides its tensors: time and operations, sums across ranks, a profile."""
