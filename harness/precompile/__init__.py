"""Precompiled steps: a step is traced in one process without ranks and written to a file, which all ranks of a run
read.

The file has a fingerprint of everything that determines the step.
"""
