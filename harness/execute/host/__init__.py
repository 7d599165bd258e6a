"""The host process, which imports torch once and forks all other processes: stages, which trace steps, and ranks, which
run them.
"""
