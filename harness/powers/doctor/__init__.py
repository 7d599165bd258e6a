"""Checks that GPUs must pass before a case runs on them, each in separate processes."""
