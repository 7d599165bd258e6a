"""Arguments and calls that mean the same in two forms, and their nearest neighbours, which do not."""

import itertools
import math
import random

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

import bitproof
from bitproof.harness.powers.proofs.prover.evaluate import same_bits
from bitproof.harness.powers.proofs.prover.graphs import argument_forms
from tests.harness.powers.proofs.scan_variants import WAYS
from tests.harness.powers.proofs.toy_graphs import randn
from tests.sweeps import sweep

X, Y = randn(4, 6), randn(4, 6)
CUBE = randn(3, 4, 5)
MASK = randn(4, 6) > 0
HALVES = torch.arange(1 << 16).to(torch.int16)

SAME = {
    "a dim from the end": (lambda x: x.softmax(-1), lambda x: x.softmax(1), (X,)),
    "of several": (lambda x: x.sum((-1, 0)), lambda x: x.sum((0, 2)), (CUBE,)),
    "of a part": (lambda x: x.cumsum(-2), lambda x: x.cumsum(1), (CUBE,)),
    "of a loss": (F.cross_entropy, lambda x, y: F.nll_loss(F.log_softmax(x, -1), y), (X, torch.arange(4))),
    "a whole number": (lambda x: x.pow(3), lambda x: x.pow(3.0), (X,)),
    "a default": (lambda x, y: torch.add(x, y, alpha=1.0), lambda x, y: x + y, (X, Y)),
    "a masked fill": (lambda x, m: x.masked_fill(m, -math.inf), lambda x, m: torch.where(m, -math.inf, x), (X, MASK)),
    "in place": (lambda x, m: x.exp().masked_fill_(m, 0), lambda x, m: torch.where(m, 0.0, x.exp()), (X, MASK)),
    "a division in place": (lambda x: x.exp().div_(3.0), lambda x: x.exp() / 3.0, (X,)),
    "a number copied": (lambda x: x + torch.tensor(2.0), lambda x: x + 2.0, (X,)),
}
OTHER = {
    "another dim": (lambda x: x.softmax(-1), lambda x: x.softmax(0), (X,)),
    "a new dim, from the end": (lambda x: x.unsqueeze(-1).exp(), lambda x: x.unsqueeze(1).exp(), (X,)),
    "shifts of dims in another order": (lambda x: x.roll((1, 2), (0, 1)), lambda x: x.roll((1, 2), (1, 0)), (X,)),
    "another number": (lambda x: x.pow(3), lambda x: x.pow(3.5), (X.abs(),)),
    "another alpha": (lambda x, y: torch.add(x, y, alpha=2.0), lambda x, y: x + y, (X, Y)),
    "the other elements": (lambda x, m: x.masked_fill(m, 0.0), lambda x, m: torch.where(m, x, 0.0), (X, MASK)),
    "a zero of another sign": (lambda x, m: x.masked_fill(m, -0.0), lambda x, m: torch.where(m, 0.0, x), (X, MASK)),
    "a division by another number": (lambda x: x.exp().div_(3.0), lambda x: x.exp() / 3.5, (X,)),
    "a factor": (lambda x: x.exp().div_(3.0), lambda x: x.exp() * (1 / 3.0), (X,)),
    "another number copied": (lambda x: x + torch.tensor(2.0), lambda x: x + 2.5, (X,)),
}


@pytest.mark.parametrize("name", sweep(SAME, "a dim from the end", "of several", "a default", "in place"))
def test_two_forms_of_one_argument_or_call_are_proved_equal(name):
    f, g, given = SAME[name]
    found = bitproof.prove(f, g, *given)
    assert found.verdict == "PROVED" and found.evaluated == len(found.answers), found


@pytest.mark.parametrize("name", sweep(OTHER, "another dim", "another alpha", "a zero of another sign", "a factor"))
def test_their_nearest_neighbours_are_not_and_are_seen_to_differ(name):
    f, g, given = OTHER[name]
    found = bitproof.prove(f, g, *given)
    if name in ("a new dim, from the end",):
        assert "dtype" in str(found) or found.differs or found.verdict == "NOT PROVED"
    else:
        assert found.verdict == "NOT PROVED" and found.differs, found


def test_only_what_a_scan_saw_is_rewritten():
    assert ("dim", "aten._softmax.default", "dim") in argument_forms.listed()
    assert ("order", "aten.sum.dim_IntList", "dim") in argument_forms.listed()
    for form in (
        ("dim", "aten.unsqueeze.default", "dim"),
        ("dim", "aten.select_backward.default", "dim"),
        ("order", "aten.roll.default", "dims"),
        ("order", "aten.permute.default", "dims"),
    ):
        assert form not in argument_forms.listed()
    assert not [name for form, name, _ in argument_forms.listed() if form == "order" and "fft" in name]


def test_a_list_is_read_as_it_was_written(tmp_path, monkeypatch):
    found = set(argument_forms.listed())
    monkeypatch.setattr(argument_forms, "FILE", tmp_path / "argument_forms.txt")
    argument_forms.write(found)
    assert argument_forms.listed() == found
    argument_forms.listed.cache_clear()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("number", [0, -0.0, 0.1, 1, 1e-8, 6e4, math.inf, -math.inf])
def test_a_masked_fill_is_a_choice_of_every_number_of_16_bits(dtype, number):
    x = HALVES.view(dtype)
    for mask in (HALVES % 2 == 0, HALVES % 3 == 0):
        kept = torch.where(mask, torch.scalar_tensor(number, dtype=dtype), x)
        assert same_bits(x.masked_fill(mask, number), kept)
        assert same_bits(x.clone().masked_fill_(mask, number), kept)


def test_a_masked_fill_is_a_choice_however_its_tensors_lie():
    cube = randn(4, 4, 4)
    for dtype in (torch.float32, torch.float64, torch.int64, torch.int32):
        for lay, other in itertools.product(WAYS.values(), repeat=2):
            x, mask = lay((cube * 100).to(dtype)), other(cube > 0)
            assert same_bits(x.masked_fill(mask, 2), torch.where(mask, torch.scalar_tensor(2, dtype=dtype), x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_a_division_in_place_has_the_bits_of_the_one_that_is_not(dtype):
    """Wherever it begins in a line of memory, and whatever is beside it."""
    chance = random.Random(0)
    numbers = [3.0, -7, 0.1, 1e-30, 0.0, 5e4, *(chance.uniform(-2, 2) for _ in range(20))]
    halves = HALVES.view(dtype) if dtype.itemsize == 2 else torch.randn(1 << 14, dtype=dtype)
    for number, begin in itertools.product(numbers, range(0, 40, 3)):
        x = halves[begin : begin + 1000 + begin] if begin else halves
        own = torch.empty(x.numel() + 64, dtype=dtype)[begin : begin + x.numel()].copy_(x)
        assert same_bits(own.div_(number), x / number)
    own = halves.clone()
    assert same_bits(own.div_(halves.flip(0)), halves / halves.flip(0))


def test_a_number_times_minus_one_is_its_negative_in_python():
    chance = random.Random(0)
    for number in [
        0.0,
        -0.0,
        math.inf,
        5e-324,
        *(chance.gauss(0, 10.0 ** chance.randint(-300, 300)) for _ in range(9999)),
    ]:
        assert (number * -1).hex() == (-1 * number).hex() == (number * -1.0).hex() == (-number).hex()


@pytest.mark.slow
def test_adamw_one_by_one_and_foreach_are_one_step_and_another_rate_is_not():
    from tests.benchmarks.written_pairs import PAIRS, adamw

    one, foreach, draw = PAIRS["AdamW, one by one and foreach"]
    torch.manual_seed(0)
    found = bitproof.prove(one, foreach, *draw(torch.float32, 1))
    assert found.verdict == "PROVED" and found.evaluated == len(found.answers), found

    def faster(model, optimizer, x):
        for group in optimizer.param_groups:
            group["lr"] = 2e-2
        adamw(True)(model, optimizer, x)
        for group in optimizer.param_groups:
            group["lr"] = 1e-2

    torch.manual_seed(0)
    assert bitproof.prove(one, faster, *draw(torch.float32, 1)).differs


# -- memory that is read as another dtype ----------------------------------------------------------------


def rotated(x, turns):
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * torch.view_as_complex(turns)).flatten(-2)


def test_products_of_complex_numbers_in_the_memory_of_real_ones_are_proved():
    x, turns = randn(3, 8), randn(3, 4, 2)
    assert bitproof.prove(rotated, lambda x, t: rotated(x.clone(), t * 1), x, turns).verdict == "PROVED"
    assert bitproof.prove(rotated, lambda x, t: rotated(x, t.flip(-1)), x, turns).differs
    twice = lambda x, t: (rotated(x, t), rotated(x + 1, t))  # noqa: E731
    assert bitproof.prove(twice, twice, x, turns).verdict == "PROVED"


def test_a_write_through_another_dtype_leaves_no_old_value_to_be_read():
    def written(x, turns):
        own = x.clone()
        torch.view_as_complex(own.reshape(3, 4, 2)).mul_(torch.view_as_complex(turns))
        return own * 2

    def unwritten(x, turns):
        return x.clone() * 2

    found = bitproof.prove(written, unwritten, randn(3, 8), randn(3, 4, 2))
    assert found.verdict == "REFUSED", found


def test_bits_that_are_read_as_whole_numbers_are_refused():
    """They would show which NaN it was, which no proof covers."""
    bits = lambda x: x.view(torch.int32) + 1  # noqa: E731
    found = bitproof.prove(bits, bits, X)
    assert found.verdict == "REFUSED" and "reads memory as another dtype" in str(found)
