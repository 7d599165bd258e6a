"""Baselines: recordings kept by environment; how far a later run drifted, which call moved, and `accept`."""
