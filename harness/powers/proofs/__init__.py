"""Static proofs that two systems compute equal bits for every input, and what they add to a run: `--prove-first`."""
