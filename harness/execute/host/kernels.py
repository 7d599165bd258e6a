"""Kernels that torch's library generates for each shape of a matrix product: made once, before ranks are forked.

oneDNN generates machine code for a product's shape when it first meets that, in 0.7 ms. How many rows an expert gets
differs from step to step and from rank to rank, so that each rank would generate some 300 in 20 steps, a seventh of its
time. A rank that is forked from a process that has met a shape finds the code there. It is the code that the rank would
generate, since nothing but shape, layout and dtype decides that; so no bit depends on who did.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from bitproof.harness.execute.host.models import EAGER, expert_sizes

if TYPE_CHECKING:
    from bitproof.harness.execute.requests import RunRequest

_MOST_ROWS = 128
"""Experts of the cases that run every night rarely get more at once."""
_FEWEST_STEPS = 16
"""Of all ranks together. In fewer, ranks would meet too few of the shapes to be worth 0.2 s."""


def make_kernels(request: RunRequest) -> None:
    """Make what the experts' products of a run on a CPU need, where that pays; nothing for a model that is not ours."""
    case = request.case
    if request.system not in EAGER or request.placement.device != "cpu" or case.precision.compute != "bfloat16":
        return  # of float32, products have one kernel for all shapes
    sizes = expert_sizes(case)
    if sizes is not None and case.steps * case.parallelism.world_size >= _FEWEST_STEPS:
        num_rows = case.batch.sequences * case.batch.seq_len * case.parallelism.ep
        multiply(*sizes, min(num_rows, _MOST_ROWS))


@functools.lru_cache
def multiply(dim: int, hidden_dim: int, most_rows: int) -> None:
    """Multiply each number of rows by an expert's weights, (out, in): as forward does, and both halves of backward."""
    import torch

    ones = functools.partial(torch.ones, dtype=torch.bfloat16)
    with torch.no_grad():
        for num_out, num_in in {(hidden_dim, dim), (dim, hidden_dim)}:
            weight = ones(num_out, num_in)
            for num_rows in range(1, most_rows + 1):
                inputs, gradients = ones(num_rows, num_in), ones(num_rows, num_out)
                torch.mm(inputs, weight.t())
                torch.mm(gradients, weight)
                torch.mm(gradients.t(), inputs)
