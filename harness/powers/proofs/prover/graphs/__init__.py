"""A step's graph as data: its calls, their memory layouts, and the operators that it may contain."""
