"""Cases with FlexAttention and a document mask. Its operator runs nested graphs, which passes must handle."""

from __future__ import annotations

from bitproof.builtin_cases.chunking import moe_seq, transformer_batch, unchunked, variant
from bitproof.harness.case import Batch, Case, Model

FAMILY = "attention"


def _flex(case: Case) -> Case:
    """Return a variant with FlexAttention, in which each line of text is a document.

    Documents begin and end within rows. For example, a row has 9, 15 and 8 tokens of three documents.
    """
    batch = Batch(data="pydoc_lines")
    return variant(case, "flex", FAMILY, model=Model(attention="flex"), batch=batch)


# Attention runs once per chunk, with its mask cut in two; or whole, with a symbolic sequence; or nothing is split.
CASES = tuple(map(_flex, (transformer_batch, moe_seq, unchunked)))
