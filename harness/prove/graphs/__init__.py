"""A step's graph as data: its calls, which operators may stand in it, where results lie in memory."""
