"""The mask that keeps documents apart: which keys each query sees, and the blocks that say so."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, create_mask

from bitproof.reference.layers.document_mask import MaskMod, document_mask, document_offsets, mask_mod_of, mask_of


def sees(starts: str) -> list[str]:
    """Who sees whom in one row: a line a query, a letter a key. In `starts`, x is a document's first token."""
    starts_BS = torch.tensor([[letter == "x" for letter in starts]])
    [[seen_QK]] = create_mask(document_mask(starts_BS).mask_mod, 1, 1, len(starts), len(starts), device="cpu")
    return ["".join("x" if one else "." for one in row) for row in seen_QK.tolist()]


def test_a_query_sees_itself_and_what_precedes_it_in_its_document() -> None:
    assert sees("x..x.") == [
        "x....",
        "xx...",
        "xxx..",
        "...x.",
        "...xx",
    ]


def test_a_row_that_begins_within_a_document_sees_its_own_part_of_it() -> None:
    assert sees("..x.") == [
        "x...",
        "xx..",
        "..x.",
        "..xx",
    ]


def test_a_row_without_a_start_is_causal() -> None:
    assert sees("...") == sees("x..") == ["x..", "xx.", "xxx"]


def test_documents_of_one_token_see_themselves_alone() -> None:
    assert sees("xxx") == ["x..", ".x.", "..x"]


def test_a_documents_last_token_of_a_row_is_not_seen_from_the_next_row() -> None:
    """Rows are apart, although the text goes on: row 1 continues the document that row 0 ends in."""
    starts_BS = torch.tensor([[True, False, True], [False, False, True]])
    seen_B1QK = create_mask(document_mask(starts_BS).mask_mod, 2, 1, 3, 3, device="cpu")
    assert seen_B1QK[:, 0].int().tolist() == [
        [[1, 0, 0], [1, 1, 0], [0, 0, 1]],
        [[1, 0, 0], [1, 1, 0], [0, 0, 1]],
    ]


@pytest.mark.parametrize(("length", "block_size"), [(32, 128), (32, 16), (31, 16), (40, 16), (256, 128), (130, 128)])
def test_the_blocks_are_those_of_create_block_mask(length: int, block_size: int) -> None:
    starts_BS = torch.rand(3, length, generator=torch.Generator().manual_seed(length)) < 0.05
    starts_BS[0] = False  # one document: all blocks are seen but for what lies ahead or beyond the row's end
    mask = document_mask(starts_BS, block_size)
    theirs = create_block_mask(mask.mask_mod, 3, None, length, length, device="cpu", BLOCK_SIZE=block_size)
    for mine, other in zip(mask.as_tuple()[:-1], theirs.as_tuple()[:-1], strict=True):
        if isinstance(mine, Tensor):
            assert torch.equal(mine, other)
            assert (mine.dtype, mine.stride()) == (other.dtype, other.stride())
        else:
            assert mine == other


def test_small_blocks_are_skipped_partly_or_wholly_seen() -> None:
    starts_BS = torch.zeros(1, 12, dtype=torch.bool)
    starts_BS[0, 8] = True
    mask = document_mask(starts_BS, 4)
    # Queries 0-3, 4-7 and 8-11: their own block in part, the first one wholly from the second, no other.
    assert mask.kv_num_blocks.tolist() == [[[1, 1, 1]]]
    assert mask.kv_indices[0, 0, :, 0].tolist() == [0, 1, 2]
    assert mask.full_kv_num_blocks.tolist() == [[[0, 1, 0]]]
    assert mask.full_kv_indices[0, 0, 1, 0] == 0


def test_the_rows_from_one_on_see_what_they_see_in_the_whole() -> None:
    starts_BS = torch.rand(4, 16, generator=torch.Generator().manual_seed(0)) < 0.2
    mask_mod = mask_mod_of(document_mask(starts_BS))
    whole = create_mask(mask_mod, 4, 1, 16, 16, device="cpu")
    upper = create_mask(mask_mod.from_row(2), 2, 1, 16, 16, device="cpu")
    assert torch.equal(upper, whole[2:])
    assert not torch.equal(upper, whole[:2])
    assert mask_mod.from_row(2).captured == mask_mod.captured
    assert torch.equal(create_mask(mask_mod.from_row(1).from_row(2), 1, 1, 16, 16, device="cpu"), whole[3:])


def test_a_function_that_is_no_mask_mod_captures_nothing() -> None:
    def causal(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return q >= kv

    mask = create_block_mask(causal, None, None, 16, 16, device="cpu", BLOCK_SIZE=16)
    assert mask_mod_of(mask) == MaskMod(causal, ())


def test_an_offset_is_the_index_of_a_documents_first_token() -> None:
    assert document_offsets(torch.tensor([0, 1, 2, 0, 1, 0])).tolist() == [0, 0, 0, 3, 3, 5]


def test_any_number_of_its_own_distinguishes_a_document() -> None:
    starts_T, offsets_T = torch.tensor([1, 0, 0, 1, 0, 1]).bool(), torch.tensor([0, 0, 0, 3, 3, 5])
    expected = document_mask(starts_T.unsqueeze(0), 4).to_dense()
    for documents_T in (offsets_T, offsets_T + 7, -offsets_T):
        assert torch.equal(mask_of(documents_T.unsqueeze(0), 4).to_dense(), expected)
    assert not torch.equal(
        mask_of(torch.zeros(1, 6, dtype=torch.int64), 2).to_dense(), document_mask(starts_T.unsqueeze(0), 2).to_dense()
    )
