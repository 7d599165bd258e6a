"""What a view shows, told by layouts, against torch over seeded random views; alignment is in `test_canonical.py`."""

import random

import pytest
import torch

from bitproof.harness.certificate_checker import term_of
from bitproof.harness.powers.proofs.prover.layouts import alignment_of, overlaps, shows, windows_of
from bitproof.harness.powers.proofs.prover.proof_data import Call, Tensor
from tests.harness.powers.proofs.test_windows import numbered, shapes, shown, some_view


def layout(x, storage=0):
    return Tensor("int64", "cpu", tuple(x.shape), x.stride(), x.storage_offset(), storage)


def view(*results, op="view"):
    return Call("view", op, (("self", ("node", 0)),), results if len(results) > 1 else results[0])


@pytest.mark.parametrize("seed", range(6))
def test_a_layout_says_which_elements_a_view_shows(seed):
    chance, found = random.Random(seed), 0
    for _ in range(100):
        x = some_view(numbered(shapes(chance)), chance)
        y = some_view(x, chance)
        [w] = windows_of(view(layout(y)), layout(x))
        if w is not None:
            found += 1
            assert torch.equal(shown(x.clone(memory_format=torch.contiguous_format), w), y)
        else:
            assert 0 in x.stride(), "only what is expanded has elements that no digits tell apart"
    assert found > 60


def test_what_lies_before_or_beyond_or_between_elements_is_none():
    x = numbered((4, 6))[1:3, :4]
    memory = numbered((4, 6))
    inside, before, beyond, between = (memory.as_strided((2,), (6,), place) for place in (7, 1, 13, 10))
    [w] = windows_of(view(layout(inside)), layout(x))
    assert torch.equal(shown(x.contiguous(), w), inside)
    for outside in (before, beyond, between):
        assert windows_of(view(layout(outside)), layout(x)) == [None]


def test_what_lies_in_other_memory_is_no_view_but_a_copy_in_order():
    x = numbered((4, 6))
    calls = [Call("x", "input", (), layout(x))]
    assert shows(view(layout(x.t())), calls)
    assert shows(view(layout(x, storage=1), op="aten.reshape.default"), calls)
    assert not shows(view(layout(x, storage=1), op="aten.exp.default"), calls)
    assert not shows(Call("add_", "aten.add_.Tensor", (("self", ("node", 0)),), layout(x), writes=("self",)), calls)


def test_parts_that_are_copied_follow_one_another():
    x = numbered((4, 6))
    parts = [part.contiguous() for part in x.split([2, 4], 1)]
    call = Call(
        "parts",
        "aten.split_with_sizes_copy.default",
        (("self", ("node", 0)), ("dim", 1)),
        tuple(layout(part, storage=1 + i) for i, part in enumerate(parts)),
    )
    assert all(torch.equal(shown(x, w), part) for w, part in zip(windows_of(call, layout(x)), parts, strict=True))


def test_two_indices_of_what_overlaps_mean_one_element():
    memory = numbered((12,))
    for strides, shared in (((3, 1), False), ((1, 2), False), ((2, 1), True), ((0, 1), True), ((1, 1), True)):
        assert overlaps(layout(memory.as_strided((2, 3), strides))) == shared


@pytest.mark.parametrize(("device", "found"), [("cpu", [0, 0, 2]), ("cuda:0", [128, 0, 130])])
def test_memory_of_cuda_has_lines_of_256_bytes_for_the_prover_and_for_the_checker(device, found):
    """cuBLASLt may take another kernel for a bfloat16 matrix that begins 64 elements, 128 bytes, into a bucket."""
    for offset, alignment in zip((64, 128, 65), found, strict=True):
        call = {"own": {"tensor": ["bfloat16", device, [2, 2], [2, 1], offset, 0]}}
        term = term_of({"calls": [call], "values": [0], "symbols": {}}, ["node", 0], True)
        assert (term[-1], alignment_of("bfloat16", offset, device)) == (alignment, alignment)
