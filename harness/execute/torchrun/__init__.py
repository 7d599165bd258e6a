"""Run cases on the ranks that torchrun made, instead of starting any: how a run outgrows one machine.

Rank 0 leads: it runs the very code that runs elsewhere, but its requests go to all ranks. The others follow until they
are told that all is done. What torchrun started only talks and carries: each has a host of its own, as a session has,
which forks its one rank of a run and watches it. They talk over connections of their own (`execute/links.py`);
torchrun's store serves to find rank 0, and the forked ranks to find each other. Recordings travel to rank 0 as the
bytes of their files; what arrives is checked like any file.

1. Rank 0 says in the store where it listens, and the others connect. Who does not connect in time is named.
2. Every rank has its host say what it is made of. Ranks that are made of other things than rank 0 are refused.
3. Rank 0 says what to run, each rank says how that ended. Who vanishes meanwhile is named within seconds.
"""
