"""A micro-batch's finished graph in stages: its parts, the order of a rank's actions, and their runner."""
