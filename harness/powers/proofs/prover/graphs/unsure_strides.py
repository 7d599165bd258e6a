"""Finds matrix products whose kernel may depend on a stride that is wrong in the fake tensor.

The stride of a dim of size 1 affects no element's address, so fake tensors often have another stride there than real
tensors. But matrix products choose their kernel by this stride. In float32, a (1, 33) times (33, 1) product has
different bits depending on the last stride of its second operand.
"""

from __future__ import annotations

from collections.abc import Sequence

from bitproof.harness.powers.proofs.prover.proof_data import Call, Tensor
from bitproof.harness.powers.proofs.prover.windows import row_major

MULTIPLIES = (
    *("mm", "mv", "dot.", "linear", "matmul", "einsum", "inner", "conv", "linalg", "cdist", "rnn", "lstm", "gru"),
    *("attention_math", "product_attention.default", "higher_order"),
)
"""Parts of operator names. All operators that multiply matrices with such kernels have one, and a few other operators.

Flash attention on the CPU is not listed. With all such strides, it computed the same bits in 768 calls and their
backwards, with 1 and 3 heads and 1 and 33 rows.
"""


def unsure_product(calls: Sequence[Call]) -> Call | None:
    """Return the first matrix product that reads a tensor whose fake stride may be wrong; None if there is none."""
    unsure: set[int] = set()  # the storages of results with an unsure stride
    for call in calls:
        read = [x for place in call.reads for x in calls[place].results]
        if any(x.storage in unsure and 1 in x.shape for x in read) and any(part in call.op for part in MULTIPLIES):
            return call
        given = {x.storage for x in read}
        # A view is left out: its storage is already known to be unsure or not.
        made = {x.storage for x in call.results if 1 in x.shape} - given
        # If a call reads only row-major tensors (including dims of size 1), its fake result has the right strides.
        if made and any(x.storage in unsure or not _is_row_major(x) for x in read):
            unsure |= made
    return None


def _is_row_major(x: Tensor) -> bool:
    # The first size has no effect on row-major strides, so it may be open.
    return all(type(n) is int for n in x.shape[1:]) and x.strides == row_major((1, *x.shape[1:]))[: len(x.shape)]
