"""Run a case: start its ranks, record the tensors of both systems, and report ranks that fail.

The command's process sends requests to a host process (`host/`), which imports torch and forks the ranks.
"""
