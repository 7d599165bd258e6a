"""Precompiled steps: traced in a process without ranks, stored in a file with a fingerprint, and read by all ranks."""
