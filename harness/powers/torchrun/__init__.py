"""Run cases on the ranks that torchrun started, for runs on several machines.

Rank 0 leads: it runs the same code as without torchrun, but sends its requests to all ranks. The others follow until
rank 0 ends them. torchrun's processes only communicate. Each has a host of its own, as a session has, and this host
forks the rank's process for a run and watches it. torchrun's processes use their own connections (`links.py`).
Through torchrun's store they find rank 0, and the forked ranks find each other. Ranks send their recordings to rank 0
as the bytes of files; rank 0 checks these like any file.

1. Rank 0 writes its address into the store, and the others connect. Ranks that do not connect in time are named.
2. Every rank's host states its versions and code. Ranks that differ from rank 0 are refused.
3. Rank 0 sends each run to all ranks, and each rank sends back the end of its part. If a rank vanishes, the error names
   it within seconds.
"""
