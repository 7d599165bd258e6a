"""Each window against what torch shows of memory, over seeded random views."""

import random

import pytest
import torch

from bitproof.harness.powers.proofs.prover.windows import Window, coalesced, composed, cut, joined, whole, window


def shown(x, w):
    return torch.empty(w.shape, dtype=x.dtype) if 0 in w.shape else x.reshape(-1).as_strided(*w)


def of(view):
    return window(view.shape, view.stride(), view.storage_offset())


def numbered(shape):
    return torch.arange(torch.Size(shape).numel()).reshape(shape)


def some_view(x, chance):
    for _ in range(chance.randint(0, 4)):
        dim = chance.randrange(x.dim()) if x.dim() else 0
        match chance.randrange(5):
            case 0 if x.dim():
                begin = chance.randint(0, x.shape[dim])
                end = chance.randint(begin, x.shape[dim])
                x = x[(slice(None),) * dim + (slice(begin, end, chance.choice([1, 1, 2])),)]
            case 1 if x.dim() > 1:
                x = x.transpose(dim, chance.randrange(x.dim()))
            case 2:
                x = x.unsqueeze(0).expand(chance.choice([1, 3]), *x.shape)
            case 3 if x.dim() > 1 and x.numel() and x.is_contiguous():
                x = x.flatten(0, 1)
            case 4 if x.dim() and x.numel() and x.shape[0] % 2 == 0 and x.is_contiguous():
                x = x.reshape(2, -1, *x.shape[1:])
    return x


def shapes(chance):
    return [chance.randint(1, 4) for _ in range(chance.randint(1, 3))]


@pytest.mark.parametrize("seed", range(8))
def test_a_window_on_a_window_shows_what_a_view_of_a_view_does(seed):
    chance, found = random.Random(seed), 0
    for _ in range(150):
        x = numbered(shapes(chance))
        inner = some_view(x, chance)
        laid_out = inner.clone(memory_format=torch.contiguous_format)
        outer = some_view(laid_out, chance)
        w = composed(of(inner), of(outer))
        if w is not None:
            found += 1
            assert torch.equal(shown(x, w), outer)
    assert found > 100


@pytest.mark.parametrize("seed", range(8))
def test_a_window_on_a_concatenation_shows_what_its_pieces_do(seed):
    chance, found = random.Random(seed), 0
    for _ in range(150):
        shape = shapes(chance)
        dim = chance.randrange(len(shape))
        sizes = [chance.randint(1, 3) for _ in range(chance.randint(1, 3))]
        parts = [numbered([*shape[:dim], n, *shape[dim + 1 :]]) + 1000 * i for i, n in enumerate(sizes)]
        laid_out = torch.cat(parts, dim).clone(memory_format=torch.contiguous_format)
        outer = some_view(laid_out, chance)
        if (answer := cut(of(outer), [part.shape for part in parts], dim)) is not None:
            found += 1
            along, pieces = answer
            shows = [shown(parts[piece.part], piece.window) for piece in pieces]
            assert torch.equal(shows[0] if along is None else torch.cat(shows, along), outer)
    assert found > 50


@pytest.mark.parametrize("seed", range(8))
def test_windows_that_follow_one_another_join_and_others_do_not(seed):
    chance = random.Random(seed)
    for _ in range(150):
        x = numbered(shapes(chance))
        view = some_view(x, chance)
        dims = [dim for dim, size in enumerate(view.shape) if size > 1]
        if not dims or 0 in view.shape:
            continue
        dim = chance.choice(dims)
        at = chance.randint(1, view.shape[dim] - 1)
        halves = view.narrow(dim, 0, at), view.narrow(dim, at, view.shape[dim] - at)
        w = joined(of(halves[0]), of(halves[1]), dim)
        assert w is not None
        assert torch.equal(shown(x, w), view)
        swapped = joined(of(halves[1]), of(halves[0]), dim)
        assert swapped is None or torch.equal(shown(x, swapped), torch.cat([halves[1], halves[0]], dim))


def test_one_window_has_one_form():
    assert window((1, 3), (99, 1), 0) == whole((1, 3)) == Window((1, 3), (0, 1), 0)
    assert window((0, 3), (3, 1), 7) == Window((0, 3), (0, 0), 0)


def test_dims_are_merged_only_where_their_steps_go_on():
    assert coalesced(Window((2, 3), (3, 1), 5)) == Window((6,), (1,), 5)
    assert coalesced(Window((2, 3), (4, 1), 5)) == Window((2, 3), (4, 1), 5)


def test_a_step_that_carries_from_digit_to_digit_is_no_window():
    columns = Window((3, 2), (1, 3), 0)  # a transposed (2, 3)
    assert composed(columns, Window((3,), (2,), 0)) == Window((3,), (1,), 0)
    assert composed(columns, Window((6,), (1,), 0)) is None
    assert composed(whole((2, 3)), Window((7,), (1,), 0)) is None


def test_a_window_that_straddles_parts_is_not_cut():
    parts = [(4, 2), (4, 2)]
    assert cut(whole((4, 4)), parts, 1) == (1, [(0, whole((4, 2))), (1, whole((4, 2)))])
    assert cut(whole((16,)), parts, 1) is None
    assert cut(Window((2,), (1,), 1), parts, 1) == (0, [(0, Window((1,), (0,), 1)), (1, Window((1,), (0,), 0))])
