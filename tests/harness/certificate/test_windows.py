"""The checker's arithmetic against torch, over the same seeded random views as the prover's."""

import random

import pytest
import torch

from bitproof.harness import certificate_checker as checker
from bitproof.harness.certificate_checker import flat, full, row_major
from tests.harness.certificate.test_check import as_json
from tests.harness.powers.proofs.test_windows import numbered, shapes, some_view


def normal(shape, strides, offset):
    return checker.normal([*shape], [*strides], offset)


def parts(w, dim, sizes):
    return checker.parts_of(w, dim, sizes)


def within(inner, outer):
    """A window on what another shows."""
    return checker.after(as_json(outer), as_json(inner))


def translated(shape, strides, weights, memory):
    return checker.translate(as_json(memory), [*shape], [*strides], [*weights])


def of(view):
    return normal(view.shape, view.stride(), view.storage_offset())


def show(x, w):
    return torch.empty(w[0], dtype=x.dtype) if 0 in w[0] else x.reshape(-1).as_strided(*w)


@pytest.mark.parametrize("seed", range(6))
def test_windows_within_windows_and_in_one_row(seed):
    chance, found = random.Random(seed), 0
    for _ in range(150):
        x = numbered(shapes(chance))
        inner = some_view(x, chance)
        assert torch.equal(show(x, flat(of(inner))).reshape(-1), inner.reshape(-1))
        laid_out = inner.clone(memory_format=torch.contiguous_format)
        outer = some_view(laid_out, chance)
        if (w := within(of(inner), of(outer))) is not None:
            found += 1
            assert torch.equal(show(x, w), outer)
    assert found > 100


@pytest.mark.parametrize("seed", range(6))
def test_parts_of_concatenations_and_of_windows(seed):
    chance, found = random.Random(seed), 0
    for _ in range(150):
        shape = shapes(chance)
        dim = chance.randrange(len(shape))
        sizes = [chance.randint(1, 3) for _ in range(chance.randint(1, 3))]
        owns = [numbered([*shape[:dim], n, *shape[dim + 1 :]]) + 1000 * i for i, n in enumerate(sizes)]
        laid_out = torch.cat(owns, dim).clone(memory_format=torch.contiguous_format)
        outer = some_view(laid_out, chance)
        for own, w in zip(owns, parts(full([*laid_out.shape]), dim, sizes), strict=True):
            assert torch.equal(show(laid_out, w), own)
        if 0 in outer.shape:
            continue
        found += 1
        for d in range(outer.dim()):
            if outer.shape[d] > 1:
                begin = chance.randint(1, outer.shape[d] - 1)
                halves = outer.narrow(d, 0, begin), outer.narrow(d, begin, outer.shape[d] - begin)
                found_parts = parts(of(outer), d, [half.shape[d] for half in halves])
                assert found_parts == [*map(of, halves)]
                assert parts(of(outer), d, [begin]) is None, "parts are the whole"
    assert found > 50


@pytest.mark.parametrize("seed", range(6))
def test_what_lies_in_the_memory_of_a_tensor_shows_elements_of_it(seed):
    chance, found = random.Random(seed), 0
    for _ in range(150):
        x = some_view(numbered(shapes(chance)), chance)
        view = some_view(x, chance)
        memory = normal(view.shape, view.stride(), view.storage_offset() - x.storage_offset())
        w = translated(x.shape, x.stride(), row_major([*x.shape]), memory)
        if w is not None:
            found += 1
            assert torch.equal(show(x.clone(memory_format=torch.contiguous_format), w), view)
        else:  # torch walks what it calls contiguous in ways that no window is of what is expanded
            assert 0 in x.stride()
    assert found > 100


@pytest.mark.parametrize(
    ("memory", "shown"),
    [
        (((3,), (1,), 5), ((3,), (1,), 3)),  # the last row but one of four of three, which lie five apart
        (((4,), (5,), 2), ((4,), (3,), 2)),
        (((3,), (1,), -5), None),
        (((3,), (1,), 1), None),
        (((5,), (5,), 0), None),
        (((2,), (1,), 15), ((2,), (1,), 9)),
        (((2,), (1,), 20), None),
    ],
)
def test_what_lies_elsewhere_is_no_element(memory, shown):
    assert translated((4, 3), (5, 1), (3, 1), memory) == as_json(shown)


def test_windows_go_forwards_and_stay_inside():
    assert within(full([2, 3]), ((2,), (1,), 4)) == [[2], [1], 4]
    assert within(full([2, 3]), ((2,), (1,), 5)) is None
    assert within(full([2, 3]), ((2,), (1,), -1)) is None
    assert within(full([2, 3]), ((2,), (-1,), 4)) is None


def test_steps_and_all_elements():
    assert row_major([2, 3, 4]) == [12, 4, 1]
    assert row_major([]) == []
    assert full([1, 3]) == [[1, 3], [0, 1], 0]
