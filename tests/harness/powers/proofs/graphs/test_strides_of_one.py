"""Calls whose fakes have other strides: of dims of one element, which kernels look at, and beside expanded operands."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from bitproof.harness.powers.proofs.prover.answers import PROVED
from bitproof.harness.powers.proofs.prover.graphs import admitted
from bitproof.harness.powers.proofs.prover.graphs.export import RefusedError
from tests.harness.powers.proofs.toy_graphs import aten, randn, verdict

ONE_CHANNEL = randn(2, 1, 8, 8).as_strided((2, 1, 8, 8), (64, 1, 8, 1))
WEIGHT = randn(16, 1, 3, 3)


def convolved(copies):
    """A convolution of what was enlarged, copied into rows first or not: the fake lies in rows already."""

    def step(w, x):
        y = aten.upsample_nearest2d.default(x, [12, 12])
        if copies:
            y = aten.clone.default(y, memory_format=torch.contiguous_format)
        return aten.convolution.default(y, w, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)

    return step


def test_a_call_whose_fake_has_another_stride_for_its_one_channel_is_refused():
    """These were PROVED equal, and had other strides, so oneDNN chose other kernels: other bits on some CPUs."""
    one, two = (convolved(copies)(WEIGHT, ONE_CHANNEL) for copies in (False, True))
    assert one.stride() != two.stride(), "or this is mended"
    plain = ONE_CHANNEL.as_strided((2, 1, 8, 8), (64, 64, 8, 1))
    assert verdict(convolved(False), convolved(True), WEIGHT, plain) == PROVED
    with pytest.raises(RefusedError, match="where dims of one element have strides as in rows"):
        verdict(convolved(False), convolved(True), WEIGHT, ONE_CHANNEL)


@pytest.mark.parametrize(
    ("strides", "layout"),
    [
        ((64, 64, 8, 1), admitted.ROWS),
        ((64, 1, 8, 1), admitted.LOOSE),
        ((64, 0, 8, 1), admitted.ROWS),
        ((64, 64, 1, 8), admitted.ANY),
    ],
)
def test_a_layout_is_loose_where_only_a_dim_of_one_element_makes_it_channels_last(strides, layout):
    x = torch.empty(200).as_strided((2, 1, 8, 8), strides)
    assert admitted.layout_of({"x": x}) == layout


def test_a_sum_takes_no_tensor_that_is_in_channels_last_by_its_one_channel():
    given = {"self": ONE_CHANNEL}
    assert "strides as in rows" in str(admitted.why_not(aten.add.Tensor, given | {"other": ONE_CHANNEL}))
    assert admitted.why_not(aten.add.Tensor, {"self": randn(5, 1).t(), "other": randn(5, 1).t()}) is None


@pytest.mark.parametrize("name", ["threshold_backward", "leaky_relu_backward", "huber_loss", "clamp"])
def test_an_operator_whose_fake_lies_otherwise_beside_an_expanded_operand_is_refused_there(name):
    x, y = randn(5, 10, 5).transpose(0, 1).contiguous().transpose(0, 1), randn(1, 10, 5).expand(5, 10, 5)
    calls = {
        "threshold_backward": ("default", {"grad_output": x, "self": y, "threshold": 0}),
        "leaky_relu_backward": (
            "default",
            {"grad_output": randn(10, 10).t(), "self": randn(1, 10).expand(10, 10), "negative_slope": 0.5}
            | {"self_is_result": False},
        ),
        "huber_loss": ("default", {"self": y, "target": x, "reduction": 0, "delta": 8.0}),
        "clamp": ("Tensor", {"self": y, "min": y - 1, "max": x}),
    }
    overload, given = calls[name]
    op = getattr(getattr(aten, name), overload)
    if name == "clamp":
        given["min"] = randn(1, 10, 5).expand(5, 10, 5)
    real = op(**given).stride()
    with FakeTensorMode() as mode:
        fakes = {key: mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for key, x in given.items()}
        assert op(**fakes).stride() != real, "or this is mended"
    assert "alone" in str(admitted.why_not(op, given))
