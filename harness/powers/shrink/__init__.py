"""Finds the smallest case that fails in the same way, or the graph pass that causes a failure.

If possible, a Python file that shows the failure without bitproof is written, too.
"""
