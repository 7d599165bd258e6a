"""The attention mask for several documents in a row: a token sees itself and earlier tokens of its own document.

B batch, S sequence, T folded tokens, N blocks of queries, M blocks of keys, X positions in a block, P positions in all
blocks
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

BLOCK_SIZE = 128
"""The number of queries, and of keys, in a block that FlexAttention may skip.

It is torch's default, a multiple of its tiles.
"""


@dataclass(frozen=True)
class MaskMod:
    """A mask function (b, h, q, kv) -> bool, and the tensors that it reads.

    `function` takes the tensors `captured` as further arguments. Tensors in a closure would become constants of a
    trace.
    """

    function: Callable[..., Tensor]
    captured: tuple[Tensor, ...] = ()

    def __call__(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return self.function(b, h, q, kv, *self.captured)

    def from_row(self, first: int) -> MaskMod:
        """Return the mask for the rows from `first` on. It still reads tensors of the whole batch."""

        def function(b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *captured: Tensor) -> Tensor:
            return self.function(b + first, h, q, kv, *captured)

        return MaskMod(function, self.captured)


def mask_mod_of(mask: BlockMask) -> MaskMod:
    """Return the function of a BlockMask as a MaskMod. A function that is no MaskMod is assumed to read no tensors."""
    mask_mod = mask.mask_mod
    return mask_mod if isinstance(mask_mod, MaskMod) else MaskMod(mask_mod)


def document_mask(starts_BS: Tensor, block_size: int = BLOCK_SIZE) -> BlockMask:
    """Return the BlockMask in which a query sees the keys of its own document, up to its own position.

    `starts_BS` is true at each document's first token. Tokens before a row's first start are another document.
    """
    return mask_of(starts_BS.cumsum(1), block_size)


def document_offsets(positions_T: Tensor) -> Tensor:
    """Return the index of the first token of each token's document: int64, (T,).

    `positions_T` are 0 at the first token of each document. For example, positions 0 1 2 0 1 give 0 0 0 3 3.
    """
    return torch.arange(positions_T.shape[0], device=positions_T.device) - positions_T


def mask_of(documents_BS: Tensor, block_size: int = BLOCK_SIZE) -> BlockMask:
    """Return the BlockMask in which a query sees the keys of its own document, up to its own position.

    `documents_BS` has the number of each token's document. Different documents of a row have different numbers.
    """
    # The result equals that of `create_block_mask`, tensor for tensor. The function itself uses `vmap` over the batch,
    # which cannot be traced with a symbolic batch size.
    rows, length = documents_BS.shape
    num_blocks = (length + block_size - 1) // block_size
    row_B = torch.arange(rows, device=documents_BS.device)
    # Positions behind the end fill the last block. They read the last token's document, and are then masked.
    padded_P = torch.arange(num_blocks * block_size, device=documents_BS.device)
    position_P, exists_P = padded_P.clamp(max=length - 1), padded_P < length

    sees_BPP = _causal_within_document(row_B[:, None, None], None, position_P[:, None], position_P, documents_BS)
    sees_BPP = sees_BPP & exists_P[:, None] & exists_P
    sees_BNXMX = sees_BPP.view(rows, num_blocks, block_size, num_blocks, block_size)
    seen_B1NM = sees_BNXMX.sum((2, 4)).unsqueeze(1)
    # FlexAttention computes full blocks without the mask, evaluates the mask in the partly visible, and skips the rest.
    full_B1NM = seen_B1NM == block_size * block_size
    part_B1NM = (seen_B1NM > 0) & ~full_B1NM
    return BlockMask(
        (length, length),
        *_in_order(part_B1NM),
        *_in_order(full_B1NM),
        *_in_order(part_B1NM.transpose(2, 3)),
        *_in_order(full_B1NM.transpose(2, 3)),
        BLOCK_SIZE=(block_size, block_size),
        mask_mod=MaskMod(_causal_within_document, (documents_BS,)),
    )


def _in_order(chosen_B1NM: Tensor) -> tuple[Tensor, Tensor]:
    """Return, for each query block, a pair: the number of chosen key blocks, and all key blocks' indices, chosen first.

    Shapes are (B, 1, N) and (B, 1, N, M), int32. Chosen blocks are in ascending order, and so are the others.
    """
    order_B1NM = chosen_B1NM.int().argsort(dim=-1, descending=True, stable=True)
    return chosen_B1NM.sum(-1).int(), order_B1NM.int().contiguous()


def _causal_within_document(b: Tensor, h: Tensor | None, q: Tensor, kv: Tensor, documents_BS: Tensor) -> Tensor:
    return (q >= kv) & (documents_BS[b, q] == documents_BS[b, kv])
