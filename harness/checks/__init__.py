"""Checks: additional questions about a case, besides comparing reference and candidate.

For example, the check sensitivity determines how many calls the case would notice if they were off by 1 ULP. A check
defines its options, may run systems again, and returns a `Finding`, which every report prints. A check is active

- if the user gives its options, for bitproof's own checks and those of installed packages, or
- with `--check FILE.py:CLASS`.

docs/how-to/own-check.md shows a complete example.
"""
