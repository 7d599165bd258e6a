"""Measure a run beside its tensors: step times and FLOPs, sums across ranks, a profile."""
