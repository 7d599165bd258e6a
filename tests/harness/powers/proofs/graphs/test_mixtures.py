"""Operators that may mix kinds of operands, tried whole: in every layout, with every dtype and kind of number."""

import itertools
import warnings

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from bitproof.harness.powers.proofs.prover import known_operators as known
from bitproof.harness.powers.proofs.prover.answers import PROVED
from bitproof.harness.powers.proofs.prover.graphs import admitted
from bitproof.harness.powers.proofs.prover.graphs.export import RefusedError
from tests.harness.powers.proofs.scan import Scanned, try_call
from tests.harness.powers.proofs.scan_variants import WAYS
from tests.harness.powers.proofs.toy_graphs import aten, randn, verdict
from tests.sweeps import sweep

X = randn(4, 4, 4)
SQUARE, LINE = torch.randint(0, 4, (4, 4)), torch.randint(0, 4, (4,))
CUBE, MASK = torch.randint(0, 4, (4, 4, 4)), X > 0
CHOOSING = {
    "_grouped_mm.default": lambda lay, other: [(lay(randn(16, 16)), lay(randn(2, 16, 16)), ENDS)],
    "_unsafe_index.Tensor": lambda lay, other: indexed(lay, other),
    "_unsafe_masked_index.default": lambda lay, other: masked(lay, other, [2]),
    "_unsafe_masked_index_put_accumulate.default": lambda lay, other: [
        *masked(lay, other, [lay(X[0])]),
        *masked(lay, other, [other(X[0])]),
    ],
    "embedding.default": lambda lay, other: [(lay(X[0]), other(SQUARE))],
    "embedding_dense_backward.default": lambda lay, other: (
        [(lay(X), other(SQUARE), 4, padding, scaled) for padding in (-1, 1) for scaled in (False, True)]
        + [(lay(X[0]), other(LINE).int(), 4, -1, False), (lay(X), other(SQUARE[:, :1]).expand(4, 4), 5, 0, False)]
    ),
    "gather.default": lambda lay, other: [(lay(X), 1, other(CUBE))],
    "index.Tensor": lambda lay, other: indexed(lay, other),
    "index_add.default": lambda lay, other: [
        (lay(X), 1, other(LINE), lay(X)),
        (lay(X), 1, other(LINE).int(), other(X)),
    ],
    "index_copy.default": lambda lay, other: [(lay(X), 1, other(ORDER), lay(X)), (lay(X), 1, other(ORDER), other(X))],
    "index_fill.int_Scalar": lambda lay, other: [(lay(X), 1, other(LINE), 2)],
    "index_put.default": lambda lay, other: [
        (lay(X), [other(SQUARE)], lay(X[:, None].expand(4, 4, 4, 4).clone())),
        *((lay(X), [other(SQUARE), other(LINE)], other(X), adds) for adds in (False, True)),
        (lay(X), [other(MASK)], X[0, 0, 0]),
    ],
    "index_select.default": lambda lay, other: [(lay(X), 1, other(LINE)), (lay(X), 1, other(LINE.int()))],
    "masked_fill.Scalar": lambda lay, other: [(lay(X), other(MASK), 2), (lay(X[0]), other(MASK), 2)],
    "masked_fill.Tensor": lambda lay, other: [(lay(X), other(MASK[0]), X[0, 0, 0])],
    "masked_scatter.default": lambda lay, other: [(lay(X), other(MASK), lay(X)), (lay(X), other(MASK), other(X))],
    "max_pool2d_with_indices_backward.default": lambda lay, other: [
        (lay(pooled), lay(X), [2, 2], [2, 2], [0, 0], [1, 1], False, other(places)) for pooled, places in [POOLED]
    ],
    "native_dropout_backward.default": lambda lay, other: [
        (lay(X), other(MASK), 1.25),
        (lay(X[0]), other(MASK[0]), 2.0),
    ],
    "nll_loss2d_backward.default": lambda lay, other: pictures(lay, other),
    "nll_loss_backward.default": lambda lay, other: losses(lay, other),
    "nll_loss_forward.default": lambda lay, other: [call[1:6] for call in losses(lay, other)],
    "scatter.src": lambda lay, other: [(lay(X), 1, other(CUBE), lay(X)), (lay(X), 1, other(CUBE), other(X))],
    "scatter.value": lambda lay, other: [(lay(X), 1, other(CUBE), 2)],
    "scatter_add.default": lambda lay, other: [(lay(X), 1, other(CUBE), lay(X)), (lay(X), 1, other(CUBE), other(X))],
    "take.default": lambda lay, other: [(lay(X), other(CUBE)), (lay(X), other(SQUARE))],
    "where.ScalarOther": lambda lay, other: [(other(MASK), lay(X), 2.0), (other(MASK[0]), lay(X), 2.0)],
    "where.ScalarSelf": lambda lay, other: [(other(MASK), 2.0, lay(X)), (other(MASK[0]), 2.0, lay(X))],
    "where.self": lambda lay, other: [
        *((other(MASK), lay(x), other(y)) for x, y in itertools.product((X, X[0], X[0, 0, 0]), (X, X[0], X[:, :1]))),
        (lay(MASK[0]), lay(X), other(X)),
    ],
}
ENDS = torch.tensor([8, 16], dtype=torch.int32)
ORDER = torch.tensor([2, 0, 3, 1])
POOLED = torch.nn.functional.max_pool2d(X, 2, return_indices=True)


def pictures(lay, other):
    """Backward calls of a loss of each pixel, or of the weighted sum."""
    pixels = X[None].expand(4, 4, 4, 4).clone()
    yield other(X), lay(pixels), other(CUBE), None, 0, -100, torch.tensor(4.0)
    yield X[0, 0, 0], lay(pixels), other(CUBE), other(X[0, 0]), 2, -100, torch.tensor(4.0)


def losses(lay, other):
    """Backward calls of a loss: of each row, or of the weighted sum."""
    yield other(X[0, 0]), lay(X[0]), other(LINE), None, 0, -100, torch.tensor(4.0)
    yield X[0, 0, 0], lay(X[0]), other(LINE), other(X[0, 0]), 2, -100, torch.tensor(4.0)


def masked(lay, other, rest):
    """Calls with a mask of what two indices take; a row that the mask leaves out lies outside."""
    for mask, index in ((MASK[0], SQUARE), (MASK[0, :1], LINE.int())):
        yield lay(X[0]), other(mask), [other(torch.where(MASK[0], SQUARE, 9)), other(index)], *rest


def indexed(lay, other):
    """Calls with one index or several, of unlike numbers of dims, beside one another or not."""
    yield from ((lay(X), [other(SQUARE), other(LINE)]), (lay(X), [None, other(SQUARE)]))
    yield from (
        (lay(X), [other(SQUARE), None, LINE]),
        (lay(X), [None, None, other(CUBE).int()]),
        (lay(X), [MASK[0, 0]]),
    )
    yield from ((lay(X), [SQUARE[:, :1].expand(4, 4), other(LINE)]), (lay(X), [None, SQUARE[:, None].expand(4, 4, 4)]))


def op_of(name):
    packet, _, overload = name.removeprefix("aten.").partition(".")
    return getattr(getattr(aten, packet), overload)


def tried(op, args, seen):
    """Whether a proof takes a call, which is run then, too."""
    given = dict(zip((x.name for x in op._schema.arguments), args, strict=False))
    if admitted.why_not(op, given) is not None:
        return False
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        return try_call(op, (args, {}), seen, is_whole=False)


def test_every_operator_whose_arguments_choose_elements_is_tried():
    assert {f"aten.{name}" for name in CHOOSING} == known.CHOOSES.keys()


@pytest.mark.parametrize(
    "name", sweep(CHOOSING, "gather.default", "index_fill.int_Scalar", "masked_fill.Scalar", "scatter.value")
)
def test_what_chooses_elements_may_lie_otherwise_than_the_elements(name):
    op, seen, taken, num_calls = op_of(name), Scanned(), 0, 0
    for lay, other in itertools.product(WAYS.values(), repeat=2):
        for args in CHOOSING[name](lay, other):
            num_calls += 1
            taken += tried(op, args, seen)
    assert (seen.faults, seen.fakes_fail) == ({}, 0)
    assert taken >= num_calls / (25 if name in ("_unsafe_index.Tensor", "native_dropout_backward.default") else 2)


@pytest.mark.parametrize("name", ["index.Tensor", "_unsafe_index.Tensor"])
def test_indices_in_columns_are_refused_as_the_kernels_result_has_columns_too_and_the_fakes_has_not(name):
    """Sums of what they give were PROVED equal for indices in rows and in columns, and were not."""
    op, line, x = op_of(name), randn(16), randn(16, 16)
    columns = aten.argsort.default(x).t().contiguous().t()
    with FakeTensorMode() as mode:
        fake = op(mode.from_tensor(line), [mode.from_tensor(columns)])
    assert op(line, [columns]).stride() == (1, 16) != fake.stride(), "or this is mended"

    def sums(turns):
        def step(w, x):
            index = aten.argsort.default(x)
            if turns:
                index = aten.clone.default(aten.t.default(index), memory_format=torch.contiguous_format).t()
            return aten.sum.dim_IntList(aten.mul.Tensor(op(w, [index]), 3), [0])

        return step

    assert not torch.equal(sums(False)(line, x), sums(True)(line, x))
    assert verdict(sums(False), sums(False), line, x) == PROVED
    with pytest.raises(RefusedError, match="its result has other strides"):
        verdict(sums(False), sums(True), line, x)


LAYS = [*WAYS.values(), lambda x: x.flatten()[0].clone()]
DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int32,
    torch.int64,
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
)
NUMBERS = (True, 2, 0.5, 1 + 1j)


def arguments(op, x, number):
    """A call with a number wherever one may stand, but for `alpha`."""
    rest = {"condition": x > 0, "mask": x > 0, "index": torch.zeros_like(x, dtype=torch.int64)}
    rest |= {"size": [2, 3], "pad": [1, 0], "dim": 0}
    tensor = {"Tensor": x, "number": number, "Optional[number]": number}
    is_by_tensor = op._overloadname == "Tensor"
    names = [each for each in op._schema.arguments if not each.has_default_value() or each.name in ("min", "value")]
    return [
        rest.get(each.name, number if is_by_tensor and each.name == "other" else tensor.get(str(each.type)))
        for each in names
    ]


@pytest.mark.parametrize("name", sweep(sorted(known.TAKES_ANY_NUMBER), "aten.clamp.default", "aten.mul.Scalar"))
def test_an_operator_that_may_read_a_number_of_any_kind_does_as_its_fake(name):
    """Whole: eight dtypes, four kinds of numbers, nine layouts and none."""
    op, seen = op_of(name), Scanned()
    taken = sum(
        tried(op, arguments(op, lay(torch.randint(0, 3, (3, 4, 2, 3)).to(dtype)), number), seen)
        for dtype, lay, number in itertools.product(DTYPES, LAYS, NUMBERS)
        if torch.result_type(torch.ones(1, dtype=dtype), number) != dtype or dtype == torch.bool
    )
    assert not seen.faults
    assert taken - seen.fakes_fail >= 50


@pytest.mark.parametrize("name", sweep(sorted(known.TAKES_NUMBERS_AS_TENSORS), "aten.sub.Tensor"))
def test_an_operator_that_may_read_a_tensor_without_dims_of_another_dtype_does_as_its_fake(name):
    """Whole: each pair of nine dtypes, in either place."""
    op, seen, taken = op_of(name), Scanned(), 0
    values = torch.randint(0, 3, (3, 4))
    for (one, two), lay in itertools.product(
        itertools.permutations((*DTYPES, torch.complex64), 2), [*WAYS.values()][:4]
    ):
        x, number = lay(values.to(one)), values[0, 0].to(two)
        for args in ((x, number), (number, x)):
            taken += tried(op, (lay(values > 0), *args) if name == "aten.where.self" else args, seen)
    assert not seen.faults
    assert taken >= 100


def test_a_tensor_without_dims_beside_others_of_another_dtype_is_refused_elsewhere():
    given = {"self": X[0, 0].half(), "other": torch.tensor(2)}
    assert "none without dims" in str(admitted.why_not(aten.hypot.default, given))


@pytest.mark.parametrize("name", ["pow.Tensor_Scalar", "_foreach_pow.Scalar"])
def test_truth_values_to_the_power_of_one_are_refused_as_their_fakes_have_another_dtype(name):
    op, seen, x = op_of(name), Scanned(), X > 0
    x = [x] if name.startswith("_") else x
    assert "number of another kind" in str(admitted.why_not(op, {"self": x, "exponent": True}))
    assert try_call(op, ((x, True), {}), seen, is_whole=False)
    assert "its dtype is another than its fake's" in seen.faults, "or this is mended"
