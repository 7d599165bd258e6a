"""The machine that ranks run on: its description, its devices, and its switches for determinism."""
