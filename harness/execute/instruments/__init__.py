"""What is measured of a run besides its tensors: time and operations, where ranks met, a profile."""
