"""Baselines: stored recordings by environment. Later runs are compared with them, and a difference can be accepted."""
