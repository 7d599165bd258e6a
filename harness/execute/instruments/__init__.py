"""Measurements of a run that are not its tensors: step times and FLOPs, sums across ranks, and a profile."""
