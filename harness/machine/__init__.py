"""The machine that ranks run on: what it is, which devices it offers, how it is made deterministic."""
