"""Which calls a scan of every pair of layouts tries, and what it sees that one layout for all tensors does not show."""

import random

import pytest
import torch

from bitproof.harness.powers.proofs.prover import known_operators as known
from tests.benchmarks.scan_operators import scan_every_mix
from tests.harness.powers.proofs.scan_variants import WAYS, every_mix, tensors_of
from tests.harness.powers.proofs.toy_graphs import aten, randn

CUBE = randn(4, 4, 4, 4)
FULL = CUBE.shape


def lies(x):
    return x.stride(), x.storage_offset()


def calls(op, *args):
    return [tensors_of(call) for call in every_mix(op, (args, {}), "", random.Random(0))]


@pytest.mark.parametrize(("op", "count"), [(aten.mul.Tensor, 2), (aten.addcmul.default, 3)])
def test_each_tensor_lies_in_every_layout_beside_the_others_in_every_other(op, count):
    ways = {lies(lay(CUBE)) for lay in WAYS.values()}
    assert len(ways) == len(WAYS)
    found = calls(op, *(CUBE.clone() for _ in range(count)))
    whole = [[lies(x) for x in call] for call in found if all(x.shape == FULL for x in call)]
    for at in range(count):
        pairs = {
            (call[at], *{*call[:at], *call[at + 1 :]}) for call in whole if len({*call[:at], *call[at + 1 :]}) == 1
        }
        assert {(one, rest) for one in ways for rest in ways} <= pairs


def test_some_tensors_are_broadcast_empty_or_show_the_memory_of_another():
    found = calls(aten.mul.Tensor, CUBE, CUBE + 1)
    assert any(x.dim() == 0 and y.shape == FULL for x, y in found)
    assert any(1 in x.shape and y.shape == FULL for x, y in found)
    assert any(x.numel() == y.numel() == 0 for x, y in found)
    shared = [x for x in found if len({y.untyped_storage().data_ptr() for y in x if y.numel()}) == 1 == len(x) - 1]
    assert {lies(x) == lies(y) for x, y in shared if x.numel()} == {True, False}


def test_an_operator_of_one_tensor_or_none_is_called_in_every_layout():
    assert {lies(x) for (x,) in calls(aten.tanh.default, CUBE)} >= {lies(lay(CUBE)) for lay in WAYS.values()}
    assert calls(aten.arange.default, 4)


def lopsided(x, y):
    return (x + y).contiguous()


def peeks(x, y):
    return x * 2 if x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr() else x + y


def sums(x, y):
    return x + (y.stride(0) if y.dim() else 0)


@pytest.mark.parametrize(
    ("own", "fake", "fault"),
    [
        (lambda x, y: x + y, lambda x, y: torch.add(x, y), None),
        (lopsided, lambda x, y: torch.add(x, y), "its strides are others than its fake's"),
        pytest.param(
            peeks,
            lambda x, y: torch.add(x, y),
            "its bits depend on whether two arguments share memory",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            sums, lambda x, y: torch.add(x, 1), "its bits depend on how its arguments lie", marks=pytest.mark.slow
        ),
    ],
)
def test_a_scan_of_every_pair_sees_strides_of_another_order_shared_memory_and_bits_that_follow_layouts(
    own, fake, fault, monkeypatch
):
    monkeypatch.setattr(known, "CARRIES", {"bitproof_pairs.op.default"})
    with torch.library._scoped_library("bitproof_pairs", "FRAGMENT") as library:
        library.define("op(Tensor x, Tensor y) -> Tensor")
        library.impl("op", own, "CPU")
        library._register_fake("op", fake)
        call = (CUBE[0], CUBE[1] + 1), {}
        seen = scan_every_mix(torch.ops.bitproof_pairs.op.default, [call], "", random.Random(0))
    assert seen.ran > 80
    assert [*seen.faults] == [fault] if fault else not seen.faults
