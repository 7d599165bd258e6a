"""A step's graph as data: its calls, the operators that it may contain, and the memory layouts of results."""
