"""The layers that models are made of, one idea a file.

Three rules hold in every file, because a training step is both split in two and traced:

- A module reads each parameter of its own exactly once in a forward: once parameters are sharded, each
  read is an all-gather.
- No shape of an input becomes a Python integer, no branch looks at one: a batch or sequence dim may be an
  unbacked symbol.
- A row's result depends on that row alone, bit for bit; where a sum is taken, its order is written down.
"""
