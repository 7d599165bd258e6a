"""Runs cases on torchrun's ranks instead of starting any, for runs on several machines.

Rank 0 leads: it runs the same code as without torchrun, but sends its requests to all ranks. The others follow until
rank 0 ends them. torchrun's processes only communicate: each has a host of its own, as a session has, and the host
forks the process's rank of a run and watches it. The processes use their own connections (`execute/links.py`). Through
torchrun's store they find rank 0, and the forked ranks find each other. Ranks send their recordings to rank 0 as the
bytes of files; rank 0 checks these like any file.

1. Rank 0 writes its address into the store, and the others connect. Ranks that do not connect in time are named.
2. Every rank's host states its versions and code. Ranks that differ from rank 0 are refused.
3. Rank 0 sends each run, and each rank its end. A rank that vanishes is named within seconds.
"""
