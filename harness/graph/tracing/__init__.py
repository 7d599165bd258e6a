"""A training step, recorded as one graph."""
