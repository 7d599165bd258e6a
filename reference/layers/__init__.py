"""The layers of the models, a file per idea.

Every file follows three rules, because a training step is both split in two and traced:

- A module reads each of its parameters exactly once in a forward, since each read of a sharded parameter is an
  all-gather.
- No code turns an input's batch or sequence dim into a Python integer or branches on it.
- A row's result depends only on that row, bit for bit. The order of every sum is stated.
"""
