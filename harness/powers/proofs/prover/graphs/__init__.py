"""Converts the graph of a step to data: its calls, their memory layouts, and the operators that it may contain."""
