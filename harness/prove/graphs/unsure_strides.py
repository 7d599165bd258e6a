"""Strides of dims of one element, which no index reaches, and which many fakes have otherwise than kernels do.

No element is read by such a stride, but what multiplies matrices chooses its kernel by it: of a (1, 33) and a (33, 1)
matrix of float32 other bits come, depending on the second's last stride. A call whose tensors lie in rows, to the last
stride, was seen to give what its fake gives; of any other, such a stride of its result is unsure.
"""

from __future__ import annotations

from collections.abc import Sequence

from bitproof.harness.prove.proof_data import Call, Tensor
from bitproof.harness.prove.windows import row_major

MULTIPLIES = (
    *("mm", "mv", "dot.", "linear", "matmul", "einsum", "inner", "conv", "linalg", "cdist", "rnn", "lstm", "gru"),
    *("attention_math", "product_attention.default", "higher_order"),
)
"""Parts of names of all operators that multiply matrices by such kernels, and of some that do not. Flash attention on
the CPU gave the same bits for all such strides of 768 calls and their backwards, of 1 and 3 heads, 1 and 33 rows."""


def unsure_product(calls: Sequence[Call]) -> Call | None:
    """The first call that multiplies a tensor with an unsure stride; None if there is none."""
    unsure: set[int] = set()  # memory of results with an unsure stride
    for call in calls:
        read = [x for place in call.reads for x in calls[place].results]
        if any(x.storage in unsure and 1 in x.shape for x in read) and any(part in call.op for part in MULTIPLIES):
            return call
        given = {x.storage for x in read}
        made = {x.storage for x in call.results if 1 in x.shape} - given
        if made and any(x.storage in unsure or not _is_in_rows(x) for x in read):
            unsure |= made
    return None


def _is_in_rows(x: Tensor) -> bool:
    """Whether a tensor lies in rows, with the strides of dims of one element as they are there."""
    return all(type(n) is int for n in x.shape[1:]) and x.strides == row_major((1, *x.shape[1:]))[: len(x.shape)]
