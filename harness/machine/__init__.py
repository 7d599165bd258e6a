"""The machine that ranks run on: its devices, its description, and the switches that make runs deterministic."""
