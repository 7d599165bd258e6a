"""Narrow a failure down: find the smallest case that fails in the same way, or the graph pass that causes the failure.

A Python file that shows the failure without bitproof is written, too.
"""
