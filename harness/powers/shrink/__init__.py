"""Narrow a failure down: to the smallest case that fails in the same way, the pass that introduces the difference,
and a Python file that shows it without bitproof.
"""
