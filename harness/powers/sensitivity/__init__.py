"""Sensitivity: how many operator calls of a step would a case notice if their output were off by 1 ULP?

`program` writes a step of every rank, optimizer included, as a list of calls. `lockstep` runs that list for all ranks
in one process and reproduces the recorded bits. `perturb` makes values wrong; `formulas` computes a call by a
neighbouring formula, e.g. `rsqrt` as `1 / sqrt(x)`. `spread` follows the error from call to call until a compared
tensor shows it or it disappears. `examine` returns the result for each call. `sensing` forks the processes, waits for
them and collects their results.
"""
