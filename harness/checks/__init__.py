"""Checks: further questions about a case, beyond comparing reference and candidate.

For example, sensitivity asks how many calls the case would notice if they were off by 1 ULP. A check declares its
options, may request further runs, and returns a `Finding`, which every report prints. It is switched on by its options
(shipped checks and those of installed packages) or by `--check FILE.py:CLASS`. docs/how-to/own-check.md shows a
complete example.
"""
