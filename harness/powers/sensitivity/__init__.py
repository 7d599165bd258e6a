"""Sensitivity: how many operator calls of a step would a case notice if their output were off by 1 ULP?

- `program` converts a step, including the optimizer's update, to a list of calls.
- `lockstep` runs this list for all ranks in one process, with the same bits as on the ranks.
- `perturb` makes a value wrong.
- `formulas` has formulas that differ from an operator only by rounding, such as `1 / sqrt(x)` for `rsqrt`.
- `spread` follows an error from call to call, until a compared tensor shows it or it disappears.
- `examine` returns the result for each call.
- `sensing` forks the processes that examine calls, and collects their results.
"""
