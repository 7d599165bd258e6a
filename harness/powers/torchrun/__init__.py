"""Run cases on the ranks that torchrun started, for runs on several machines.

Rank 0 leads: it runs the same code as without torchrun, but sends each request to all ranks. The other ranks follow
until rank 0 ends. The processes that torchrun started only communicate. Each has a host, a child process that loads
torch; for each run, the host forks a process that is the rank, and watches it. The communicating processes use their
own connections (`links.py`). Torchrun's store is used to find rank 0, and by the forked ranks to find each other. Ranks
send their recordings to rank 0 as the bytes of files; rank 0 checks these like any file.

1. Rank 0 writes its address into the store, and the others connect. An error names the ranks that do not connect in
   time.
2. Every rank's host reports its versions and code. Ranks that differ from rank 0 are refused.
3. Rank 0 sends each run to all ranks, and each rank reports how its part ended. If a rank vanishes, the error names it
   within seconds.
"""
