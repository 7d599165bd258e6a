"""The layers of the models, a file per idea.

Every file follows three rules, because a training step is both split in two and traced:

- A module reads each of its parameters exactly once in a forward: with sharded parameters each read is an all-gather.
- No code turns an input's shape into a Python integer or branches on it: a batch or sequence dim may be an unbacked
  symbol.
- A row's result depends only on that row, bit for bit; the order of every sum is stated.
"""
