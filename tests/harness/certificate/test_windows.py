"""The checker's arithmetic against torch, over the same seeded random views as the prover's."""

import random

import pytest
import torch

from harness.certificate.windows import VIEWS, flat, follows, full, normal, part, shown, steps_of, within
from tests.harness.prove.test_windows import numbered, shapes, some_view

aten = torch.ops.aten


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
def test_parts_of_concatenations_and_neighbours(seed):
    chance, found = random.Random(seed), 0
    for _ in range(150):
        shape = shapes(chance)
        dim = chance.randrange(len(shape))
        sizes = [chance.randint(1, 3) for _ in range(chance.randint(1, 3))]
        parts = [numbered([*shape[:dim], n, *shape[dim + 1 :]]) + 1000 * i for i, n in enumerate(sizes)]
        laid_out = torch.cat(parts, dim).clone(memory_format=torch.contiguous_format)
        outer = some_view(laid_out, chance)
        begin = 0
        for own in parts:
            indices = range(begin, begin + own.shape[dim])
            assert torch.equal(show(laid_out, part(laid_out.shape, dim, indices)), own)
            begin += own.shape[dim]
        if 0 in outer.shape:
            continue
        found += 1
        for d in range(outer.dim()):
            if outer.shape[d] > 1:
                one, two = outer.narrow(d, 0, 1), outer.narrow(d, 1, outer.shape[d] - 1)
                joined = follows(of(one), of(two), d)
                assert joined is not None
                assert torch.equal(show(laid_out, joined), outer)
                swapped = follows(of(two), of(one), d)
                assert swapped is None or torch.equal(show(laid_out, swapped), torch.cat([two, one], d))
    assert found > 50


CALLS = {
    "aten.view.default": [((2, 6), {"size": [3, -1]}), ((2, 6), {"size": [12]})],
    "aten._unsafe_view.default": [((2, 6), {"size": [3, 4]})],
    "aten.reshape.default": [((2, 6), {"shape": [4, 3]})],
    "aten.expand.default": [((2, 1), {"size": [3, 2, 4]}), ((2, 1), {"size": [-1, 4]})],
    "aten.t.default": [((2, 3), {}), ((4,), {})],
    "aten.permute.default": [((2, 3, 4), {"dims": [2, 0, -2]})],
    "aten.transpose.int": [((2, 3, 4), {"dim0": 0, "dim1": -1})],
    "aten.squeeze.default": [((2, 1, 1), {}), ((1,), {})],
    "aten.squeeze.dim": [((2, 1, 3), {"dim": 1}), ((2, 1, 3), {"dim": 0})],
    "aten.squeeze.dims": [((1, 1, 3), {"dim": [0, 2]})],
    "aten.unsqueeze.default": [((2, 3), {"dim": -1}), ((2, 3), {"dim": 0})],
    "aten.slice.Tensor": [
        ((5, 3), {"dim": 0, "start": 1, "end": 9223372036854775807, "step": 2}),
        ((5, 3), {"dim": -1, "start": -2}),
        ((5, 3), {"start": 4, "end": 2}),
    ],
    "aten.select.int": [((5, 3), {"dim": 0, "index": -2}), ((5, 3), {"dim": 1, "index": 2})],
    "aten.unbind.int": [((3, 2), {"dim": 1}), ((3, 2), {})],
    "aten.split.Tensor": [((5, 2), {"split_size": 2}), ((2, 5), {"split_size": 3, "dim": -1})],
    "aten.split_with_sizes.default": [((5, 2), {"split_sizes": [1, 4]}), ((2, 5), {"split_sizes": [3, 2], "dim": 1})],
    "aten.split_with_sizes_copy.default": [((2, 5), {"split_sizes": [3, 2], "dim": 1})],
}


@pytest.mark.parametrize(("op", "shape", "args"), [(op, *call) for op, calls in CALLS.items() for call in calls])
def test_each_view_shows_what_torch_shows(op, shape, args):
    name, overload = op.removeprefix("aten.").split(".")
    x = numbered(shape)
    found = getattr(getattr(aten, name), overload)(x, **args)
    results = list(found) if isinstance(found, (list, tuple)) else [found]
    data = {key: ("list", *value) if isinstance(value, list) else value for key, value in args.items()}
    windows = shown(op, shape, data, tuple(results[0].shape))
    assert all(torch.equal(show(x, w), result) for w, result in zip(windows, results, strict=True))


def test_every_view_is_tried_and_no_other_is_one():
    assert VIEWS.keys() == CALLS.keys()
    with pytest.raises(KeyError):
        shown("aten.flip.default", (2,), {}, (2,))


@pytest.mark.parametrize(
    ("op", "args", "result"),
    [
        ("aten.view.default", {"size": ("list", 3, 3)}, (3, 3)),
        ("aten.view.default", {"size": ("list", 3, 4)}, (4, 3)),
        ("aten.expand.default", {"size": ("list", 3, 6)}, (3, 6)),
        ("aten.t.default", {"dim": 1}, (6, 2)),
        ("aten.permute.default", {"dims": ("graph", 1, 0)}, (6, 2)),
        ("aten.split_with_sizes.default", {"split_sizes": ("graph", 1, 1)}, (1, 6)),
        ("aten.split_with_sizes.default", {"split_sizes": ("list", 1, 2)}, (1, 6)),
    ],
)
def test_a_view_that_torch_would_not_make_is_refused(op, args, result):
    with pytest.raises(ValueError, match=r"gives another|does not repeat|does not take|is no list|in all of"):
        shown(op, (2, 6), args, result)


def test_steps_and_all_elements():
    assert steps_of((2, 3, 4)) == (12, 4, 1)
    assert steps_of(()) == ()
    assert full((1, 3)) == ((1, 3), (0, 1), 0)
