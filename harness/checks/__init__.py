"""Checks: what a run does with a case beyond comparing reference and candidate.

A check states its options, may ask for further runs, and returns a `Finding`, which every report prints. It is switched
on by its options (those in the `SHIPPED` table and of installed packages) or by `--check FILE.py:CLASS`.
docs/how-to/own-check.md shows a whole one.
"""
