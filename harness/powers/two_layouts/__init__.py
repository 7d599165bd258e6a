"""Cases whose systems divide tensors among ranks differently: cells are compared, and rounding is bounded."""
