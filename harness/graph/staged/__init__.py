"""A finished graph of one micro-batch in stages: its parts, the order of a rank's work, and what runs that."""
