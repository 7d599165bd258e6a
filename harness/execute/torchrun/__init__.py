"""Runs cases on torchrun's ranks instead of starting any, for runs on several machines.

Rank 0 leads: it runs the same code as without torchrun, but sends its requests to all ranks. The others follow until
rank 0 ends them. torchrun's processes only communicate: each has its own host, like a session, which forks its one rank
of a run and watches it. They use their own connections (`execute/links.py`); through torchrun's store they find rank 0,
and the forked ranks find each other. Ranks send their recordings to rank 0 as bytes of their files, which are checked
like any file.

1. Rank 0 writes its address into the store, and the others connect. Ranks that do not connect in time are named.
2. Every rank's host states its versions and code. Ranks that differ from rank 0 are refused.
3. Rank 0 sends each run, and each rank its end. A rank that vanishes is named within seconds.
"""
