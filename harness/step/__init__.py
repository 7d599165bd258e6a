"""A training step as calls over versioned values, read from an fx graph.

- `effects`: what a call does to the memory of its arguments: which it writes, shares, waits for or frees.
- `storages`: which values of a graph share memory, and which calls write it. Cheap enough for every pass.
- `step_program`: the whole step: each call with the values that it reads and makes, and the memory of each value. It
  also follows nested graphs (`nested`).

For example, in `y = x.view(8); x.add_(1); z = y * 2`, the call `add_` makes a new version of x. The memory of y is that
of x, so `z` reads what `add_` wrote.
"""
