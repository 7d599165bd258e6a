"""Products of what may have another stride than its fake, where a dim has one element."""

import pytest
import torch

from bitproof.harness.powers.proofs.prover.answers import PROVED
from bitproof.harness.powers.proofs.prover.graphs.export import RefusedError
from tests.harness.powers.proofs.toy_graphs import aten, randn, verdict


def multiplied(copies, of=aten.gelu.default):
    """A product of what was computed, copied into rows first or not: the fake lies in rows already."""

    def step(w, x):
        y = of(x)
        if copies:
            y = aten.clone.default(y, memory_format=torch.contiguous_format)
        return aten.mm.default(w, y)

    return step


def test_a_product_of_what_has_another_stride_than_its_fake_is_refused():
    """These were PROVED equal, and had neither the same strides nor, of most inputs, the same bits."""
    row, column = randn(1, 33), randn(73).as_strided((33, 1), (2, 33))
    one, two = (multiplied(copies)(row, column) for copies in (False, True))
    assert aten.gelu.default(column).stride() == (1, 33), "or this is mended"
    assert not torch.equal(one, two)
    for copies in (False, True):
        with pytest.raises(RefusedError, match="of a tensor that may have another stride"):
            verdict(multiplied(copies), multiplied(copies), row, column)


def test_strides_are_unsure_until_a_dim_of_one_element_is_gone():
    column, rows, row = randn(73).as_strided((33, 1), (2, 33)), randn(33, 1), randn(1, 33)
    assert verdict(multiplied(False), multiplied(True), row, rows) == PROVED

    def twice(w, x):
        return aten.mm.default(w, aten.tanh.default(aten.gelu.default(x)))

    def viewed(w, x):
        return aten.mm.default(w, aten.t.default(aten.t.default(aten.gelu.default(x))))

    def without(w, x):
        return aten.sum.default(aten.mul.Tensor(w, aten.squeeze.dim(aten.gelu.default(x), 1)))

    for step in (twice, viewed):
        with pytest.raises(RefusedError, match="may have another stride"):
            verdict(step, step, row, column)
    assert verdict(without, without, row, column) == PROVED
    assert (
        verdict(multiplied(False, of=aten.alias.default), multiplied(False, of=aten.alias.default), row, column)
        == PROVED
    )
