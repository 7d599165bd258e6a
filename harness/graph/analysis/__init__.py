"""What passes ask of a graph: what depends on what, which rows mix, what takes memory."""
