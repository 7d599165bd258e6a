"""Let oneDNN generate the machine code of the experts' matrix products once, before ranks are forked.

Otherwise each rank would spend a seventh of its time on generating code for new numbers of rows.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from bitproof.harness.execute.host.models import EAGER, expert_sizes

if TYPE_CHECKING:
    from bitproof.harness.execute.requests import RunRequest

_MOST_ROWS = 128
"""The most rows for which kernels are generated. Experts of the nightly cases rarely receive more rows at once."""
_FEWEST_STEPS = 16
"""The fewest steps, over all ranks, for which kernels are generated early: in fewer steps, too few shapes occur.

Generating all kernels takes 0.2 s.
"""


def make_kernels(request: RunRequest) -> None:
    """Generate the kernels for the experts of a run on the CPU.

    Does nothing if that would save no time: for a model without experts, a run of few steps, or dtypes other than
    bfloat16.
    """
    case = request.case
    if request.system not in EAGER or request.placement.device != "cpu" or case.precision.compute != "bfloat16":
        return  # float32 products share a kernel for all shapes
    sizes = expert_sizes(case)
    if sizes is not None and case.steps * case.parallelism.world_size >= _FEWEST_STEPS:
        num_rows = case.batch.sequences * case.batch.seq_len * case.parallelism.ep
        multiply(*sizes, min(num_rows, _MOST_ROWS))


@functools.lru_cache
def multiply(dim: int, hidden_dim: int, most_rows: int) -> None:
    """Compute the matrix products of an expert's layer, once for each number of rows from 1 to `most_rows`.

    These are the product of forward, and two products of backward: the gradients of the input and of the weight.
    """
    import torch

    ones = functools.partial(torch.ones, dtype=torch.bfloat16)
    with torch.no_grad():
        # The shapes of an expert's weights, (out, in). A set, because both are the same if the dims are equal.
        for num_out, num_in in {(hidden_dim, dim), (dim, hidden_dim)}:
            weight = ones(num_out, num_in)
            for num_rows in range(1, most_rows + 1):
                inputs, gradients = ones(num_rows, num_in), ones(num_rows, num_out)
                torch.mm(inputs, weight.t())
                torch.mm(gradients, weight)
                torch.mm(gradients.t(), inputs)
