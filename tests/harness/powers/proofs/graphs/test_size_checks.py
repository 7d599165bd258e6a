"""Operators that compute from shapes that they do not check: taken where these fit, refused where they do not."""

import random

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from bitproof.harness.powers.proofs.prover.graphs import admitted, size_checks
from bitproof.harness.powers.proofs.prover.graphs.export import RefusedError
from tests.harness.powers.proofs.scan import Scanned, scan, try_call
from tests.harness.powers.proofs.toy_graphs import aten, randn, verdict
from tests.sweeps import sweep

X, ROW = randn(4, 6), randn(6)

LOSS, MASK = torch.zeros(2, 3, 4), torch.zeros(4, 4)
HEADS = randn(2, 3, 4, 8)
POOLED = {"stride": [1, 1], "padding": [0, 0], "ceil_mode": False, "count_include_pad": True, "divisor_override": None}
FITTING = {
    "_log_softmax_backward_data": {"grad_output": X, "output": X, "dim": 1, "input_dtype": torch.float32},
    "_softmax_backward_data": {"grad_output": X, "output": X, "dim": 1, "input_dtype": torch.float32},
    "avg_pool2d_backward": {"grad_output": HEADS, "self": HEADS, "kernel_size": [1, 1], **POOLED},
    "reflection_pad1d_backward": {"grad_output": HEADS[0], "self": HEADS[0], "padding": [0, 0]},
    "native_layer_norm_backward": {
        **{"grad_out": X, "input": X, "normalized_shape": [6], "mean": randn(4, 1), "rstd": randn(4, 1)},
        **{"weight": ROW, "bias": ROW, "output_mask": [True] * 3},
    },
    "_scaled_dot_product_flash_attention_for_cpu": {"query": HEADS, "key": HEADS, "value": HEADS, "attn_mask": MASK},
    "_scaled_dot_product_flash_attention_for_cpu_backward": {
        **dict.fromkeys(("grad_out", "query", "key", "value", "out"), HEADS),
        **{"logsumexp": LOSS, "dropout_p": 0.0, "is_causal": False, "attn_mask": MASK},
    },
}
MISFITS = [
    ("_log_softmax_backward_data", "output", X[0, 0]),
    ("_softmax_backward_data", "output", X[:2]),
    ("avg_pool2d_backward", "grad_output", randn(4, 3, 4, 8)),
    ("reflection_pad1d_backward", "self", randn(6, 4, 8)),
    ("native_layer_norm_backward", "grad_out", X[0, 0]),
    ("native_layer_norm_backward", "mean", randn(2, 1)),
    ("native_layer_norm_backward", "rstd", X[0, 0]),
    ("_scaled_dot_product_flash_attention_for_cpu", "query", randn(4, 3, 4, 8)),
    ("_scaled_dot_product_flash_attention_for_cpu", "value", randn(2, 3, 2, 8)),
    ("_scaled_dot_product_flash_attention_for_cpu", "attn_mask", torch.zeros(3, 4)),
    ("_scaled_dot_product_flash_attention_for_cpu_backward", "logsumexp", torch.zeros(2, 3, 3)),
    ("_scaled_dot_product_flash_attention_for_cpu_backward", "grad_out", randn(2, 3, 2, 8)),
]


@pytest.mark.parametrize("name", FITTING)
def test_an_operator_that_does_not_check_shapes_is_taken_where_they_fit(name):
    op = getattr(aten, name).default
    assert admitted.why_not(op, FITTING[name]) is None
    op(**FITTING[name])


@pytest.mark.parametrize(("name", "argument", "other"), MISFITS)
def test_an_operator_that_does_not_check_shapes_is_refused_where_they_do_not_fit(name, argument, other):
    """It reads beyond its tensors, whatever lies there, or ends the process."""
    op, given = getattr(aten, name).default, {**FITTING[name], argument: other}
    assert "these do not fit" in str(admitted.why_not(op, given))
    assert not try_call(op, ((), given), Scanned())


@pytest.mark.parametrize("name", ["_pdist_backward", "lu_unpack", "segment_reduce", "adaptive_max_pool2d_backward"])
def test_an_operator_that_checks_no_shapes_and_is_seldom_used_is_not_admitted(name):
    assert "is not among" in admitted.why_not(getattr(aten, name).default)


READS = "it does not give one result of the same arguments"


@pytest.mark.parametrize(
    "name",
    sweep(
        ["_log_softmax_backward_data", "native_layer_norm_backward", "_pdist_backward"],
        "_log_softmax_backward_data",
        "_pdist_backward",
    ),
)
def test_a_scan_sees_that_a_call_reads_beyond_its_tensors(monkeypatch, name):
    monkeypatch.setattr("tests.harness.powers.proofs.scan.sizes_misfit", lambda *_: False)
    call = FITTING.get(name, {"grad": randn(6), "self": X, "p": 0.5, "pdist": randn(6)})
    op = getattr(aten, name).default
    seen = scan(op, [((), call)], at_most=120, chance=random.Random(0))
    assert READS in seen.faults
    monkeypatch.setattr("tests.harness.powers.proofs.scan.sizes_misfit", size_checks.sizes_misfit)
    seen = scan(op, [((), call)], at_most=120, chance=random.Random(0))
    assert (READS in seen.faults) == (name == "_pdist_backward")


@pytest.mark.parametrize("name", ["index", "_unsafe_index"])
@pytest.mark.parametrize("lie", [lambda x: x, lambda x: x.transpose(0, 1).contiguous().transpose(0, 1)])
def test_an_index_without_dims_is_refused_and_one_of_one_element_is_not(name, lie):
    """Of `index(x, [i, j])` torch's fake forgets the dims of `i` where `j` has none."""
    op, x, two = getattr(aten, name).Tensor, lie(randn(2, 3, 4)), torch.tensor([1, 0])
    for indices in ([two, torch.tensor(1)], [torch.tensor(1)], [None, torch.tensor(1), None]):
        assert "these do not fit" in str(admitted.why_not(op, {"self": x, "indices": indices}))
    assert "these do not fit" not in str(admitted.why_not(op, {"self": x, "indices": [two, torch.tensor([1]), None]}))


def test_indices_may_be_expanded_from_rows_and_not_from_columns():
    """As positions of tokens are, which all sequences of a batch share."""
    rows, columns = torch.randint(0, 4, (2, 3)), torch.randint(0, 4, (3, 2)).t()
    for lie in (lambda x: x.expand(4, 2, 3), lambda x: x[:, None].expand(2, 4, 3), lambda x: x[:, :1].expand(2, 3)):
        step = lambda w, i, lie=lie: aten.index.Tensor(w, [lie(i)])  # noqa: E731
        assert verdict(step, step, X, rows) == "PROVED"
        fits = admitted.why_not(aten.index.Tensor, {"self": X, "indices": [lie(columns)]}) is None
        assert fits == (lie(columns).dim() == 2), "one dim that is not expanded has no order"


def test_the_fake_of_an_index_without_dims_is_wrong_beside_another(monkeypatch):
    """Or this is mended, and the call above need not be refused."""
    monkeypatch.setattr("tests.harness.powers.proofs.scan.sizes_misfit", lambda *_: False)
    seen = Scanned()
    assert try_call(aten.index.Tensor, ((randn(2, 3, 4), [torch.tensor([1, 0]), torch.tensor(1)]), {}), seen)
    assert "its shape is another than its fake's" in seen.faults


def test_a_transposition_of_an_index_without_dims_is_no_longer_proved_away():
    """Its result has two dims, its fake one, of which `t` is nothing: it was PROVED, and differed."""
    indices = torch.tensor([1, 0]), torch.tensor(1)
    turned = lambda x, *own: aten.t.default(aten.index.Tensor(x + x, [*own]))  # noqa: E731
    plain = lambda x, *own: aten.index.Tensor(x * 2, [*own])  # noqa: E731
    with pytest.raises(RefusedError, match="these do not fit"):
        verdict(turned, plain, randn(2, 3, 4), *indices)
    assert verdict(plain, plain, randn(2, 3, 4), indices[0], torch.tensor([1])) == "PROVED"


@pytest.mark.parametrize("name", ["index", "_unsafe_index"])
def test_an_index_behind_a_dim_of_one_element_that_lies_out_of_order_is_refused(name):
    """The kernel's result lies in rows, the fake's as `x` does: sums of it and of a copy in that order were PROVED
    equal, and were not."""
    op, i = getattr(aten, name).Tensor, torch.arange(16)
    x = randn(16, 16, 1)
    turned = x.permute(2, 1, 0)
    with FakeTensorMode() as mode:
        fake = op(mode.from_tensor(turned), [None, mode.from_tensor(i)])
    assert op(turned, [None, i]).stride()[1:] == (16, 1) != fake.stride()[1:], "or this is mended"
    assert "these do not fit" in str(admitted.why_not(op, {"self": turned, "indices": [None, i]}))
    for own, indices in ((turned, [i[:1], i, i]), (turned[0], [i]), (x.view(1, 16, 16).transpose(1, 2), [None, i])):
        assert "these do not fit" not in str(admitted.why_not(op, {"self": own, "indices": indices}))


def test_sums_of_what_is_taken_behind_a_dim_of_one_element_are_not_proved():
    def sums(is_copied):
        def step(x, i):
            y = aten.index.Tensor(aten.permute.default(x, [2, 1, 0]), [None, i])
            if is_copied:
                rows = aten.clone.default(y.permute(2, 1, 0), memory_format=torch.contiguous_format)
                y = aten.permute.default(rows, [2, 1, 0])
            return aten.sum.dim_IntList(aten.mul.Tensor(y, 3), [1])

        return step

    x, i = randn(16, 16, 1), torch.arange(16)
    assert not torch.equal(sums(False)(x, i), sums(True)(x, i))
    with pytest.raises(RefusedError, match="its result has other strides"):
        verdict(sums(False), sums(True), x, i)
