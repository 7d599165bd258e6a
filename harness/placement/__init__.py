"""Choose how tensors are placed on the ranks, by a linear program over a traced step.

- `problem`: nodes with choices, edges with costs, and a limit on memory.
- `build`: turns a traced step into such a problem.
- `strategies`: the ways to shard each operator, from DTensor's sharding propagator, and the costs of converting
  placements.
- `solve`: finds the optimum, by HiGHS, or the least memory that any solution needs.
"""
