"""Runs cases on the ranks that torchrun started, possibly on several machines.

Rank 0 runs the same code as without torchrun, but sends each request to all ranks. The other ranks follow until rank 0
ends.

1. Rank 0 writes its address into torchrun's store, and the other ranks connect. An error names missing ranks.
2. Every rank reports its versions and code. Ranks that differ from rank 0 are refused.
3. Rank 0 sends each run to all ranks. Each rank reports how its part of the run ended, and sends its files.

The processes that torchrun started only communicate. Each has a child process, the host, which loads torch and forks a
process for each run.
"""
