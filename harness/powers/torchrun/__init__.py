"""Run cases on the ranks that torchrun started, for runs on several machines.

Rank 0 leads: it runs the same code as without torchrun, but sends each request to all ranks. The other ranks follow
until rank 0 ends.

1. Rank 0 writes its address into torchrun's store, and the other ranks connect. An error names the ranks that do not
   connect in time.
2. Every rank reports its versions and code. Ranks that differ from rank 0 are refused.
3. Rank 0 sends each run to all ranks, and each rank reports how its part ended. If a rank vanishes, the error names it
   within seconds.
4. Ranks send their recordings to rank 0 as the bytes of files. Rank 0 checks these like any file.

The processes that torchrun started only communicate, over their own connections (`links.py`). Each has a child process,
the host, which loads torch. For each run, the host forks the process that computes, and watches it. The forked
processes find each other in torchrun's store.
"""
