"""Which operators a proof may meet, and what a call must not do to memory."""

import operator
import random

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule

from bitproof.harness.graph.groups import GroupTable
from bitproof.harness.powers.proofs.prover.answers import prove_graphs
from bitproof.harness.powers.proofs.prover.graphs import admitted
from bitproof.harness.powers.proofs.prover.graphs.export import RefusedError, export_graph
from tests.harness.powers.proofs.scan import Scanned, scan, try_call
from tests.harness.powers.proofs.toy_graphs import as_data, aten, randn, verdict

W, X, MEAN, VAR = randn(6, 6), randn(4, 6), torch.zeros(6), torch.ones(6)


def graph_of(build):
    """A graph made by hand: `build` is handed what adds a call, and the inputs."""
    graph = Graph()
    inputs = [graph.placeholder(f"p{place}") for place in range(4)]
    graph.output((build(lambda op, *args, **kwargs: graph.call_function(op, args, kwargs), *inputs),))
    return GraphModule(torch.nn.Module(), graph)


def export(build):
    return as_data(graph_of(build), (W, X, MEAN, VAR))


STATISTICS = [
    ("native_batch_norm", (None, None, "mean", "var", False, 0.1, 1e-5)),
    ("batch_norm", (None, None, "mean", "var", True, 0.1, 1e-5, False)),
    ("_batch_norm_impl_index", (None, None, "mean", "var", True, 0.1, 1e-5, False)),
    ("instance_norm", (None, None, "mean", "var", True, 0.1, 1e-5, False)),
    ("cudnn_batch_norm", (None, "mean", "var", True, 0.1, 1e-5)),
    ("miopen_batch_norm", (None, "mean", "var", True, 0.1, 1e-5)),
    ("_batch_norm_with_update", (None, None, "mean", "var", 0.1, 1e-5)),
]


@pytest.mark.parametrize(("name", "rest"), STATISTICS)
def test_an_operator_that_may_write_statistics_which_its_schema_leaves_out_is_refused(name, rest):
    def step(call, w, x, mean, var):
        y = call(aten.mm.default, x, w)
        call(getattr(aten, name).default, y, *({"mean": mean, "var": var}.get(x, x) for x in rest))
        return call(aten.add.Tensor, y, mean)

    with pytest.raises(RefusedError, match=name):
        export(step)


@pytest.mark.parametrize(
    ("train", "lacks"),
    [(True, {}), (False, {}), (True, {"save_mean": None}), (False, {"running_var": None}), (True, {"save_invstd": 3})],
)
def test_a_batch_norms_backward_is_taken_where_it_has_the_statistics_that_it_reads(train, lacks):
    """Without, it ends the process; of shorter ones it reads beyond the end. The others it does not read."""
    given = dict.fromkeys(("save_mean", "save_invstd") if train else ("running_mean", "running_var"), MEAN)
    given |= {name: size and MEAN[:size] for name, size in lacks.items()}
    given |= {"grad_out": X, "input": X, "weight": VAR, "train": train, "eps": 1e-5, "output_mask": [True] * 3}
    refused = admitted.why_not(aten.native_batch_norm_backward.default, given)
    assert ("these do not fit" in refused) if lacks else refused is None
    assert not (lacks and try_call(aten.native_batch_norm_backward.default, ((), given), Scanned()))


@pytest.mark.parametrize(
    ("name", "p", "train"),
    [("native_dropout", 0.0, True), ("native_dropout", 0.5, False), ("dropout", 0.0, True), ("dropout", 0.5, False)],
)
def test_a_dropout_whose_fake_may_be_what_it_reads_is_refused(name, p, train):
    with pytest.raises(RefusedError, match=name):
        export(lambda call, w, x, *_: call(getattr(aten, name).default, call(aten.mm.default, x, w), p, train))


@pytest.mark.parametrize(("name", "sizes"), [("split", 2), ("split_with_sizes", [2, 2])])
def test_an_unsafe_split_is_the_split_that_it_is_and_shares_its_memory(name, sizes):
    overload = "Tensor" if name == "split" else "default"

    def calls(name):
        def step(call, w, x, *_):
            whole = call(aten.mm.default, x, w)
            part = call(operator.getitem, call(getattr(getattr(aten, name), overload), whole, sizes), 0)
            call(aten.mul_.Tensor, part, part)
            return whole

        return export(step)

    unsafe, safe = calls(f"unsafe_{name}"), calls(name)
    assert [(call.op, call.args, call.value, call.writes) for call in unsafe.calls] == [
        (call.op, call.args, call.value, call.writes) for call in safe.calls
    ]


def test_a_transposition_in_place_is_a_view_of_a_new_tensor_that_nobody_else_has():
    def turned(call, w, x, *_):
        return call(aten.transpose_.default, call(aten.mm.default, x, w), 0, 1)

    found = export(turned)
    assert found.calls[-1].value.strides == (1, 6) and not found.calls[-1].writes


def read_by_its_old_name(call, w, x, *_):
    product = call(aten.mm.default, x, w)
    return call(aten.add.Tensor, call(aten.transpose_.default, product, 0, 1), product)


@pytest.mark.parametrize(
    "step",
    [
        read_by_its_old_name,
        lambda call, w, x, *_: call(aten.transpose_.default, x, 0, 1),
        lambda call, w, x, *_: call(aten.transpose_.default, call(aten.t.default, call(aten.mm.default, x, w)), 0, 1),
        lambda call, w, x, *_: call(
            aten.transpose_.default, call(operator.getitem, call(aten.split.Tensor, w, 2), 0), 0, 1
        ),
    ],
)
def test_a_transposition_in_place_of_a_tensor_that_has_another_name_is_refused(step):
    with pytest.raises(RefusedError, match=r"transpose_\.default is not among"):
        export(step)


LSTM = aten.mkldnn_rnn_layer, aten.mkldnn_rnn_layer_backward


def test_an_lstms_layer_is_refused_as_its_fakes_say_what_is_not_so():
    """Its workspace has another size, some of whose bytes are never written; two gradients of biases share memory."""
    assert all("is not among" in admitted.why_not(operator.default) for operator in LSTM)
    sizes, hidden = (3, 2, 4), 5
    weights = randn(4 * hidden, 4), randn(4 * hidden, hidden), randn(4 * hidden), randn(4 * hidden)
    given = (randn(*sizes), *weights, randn(1, 2, hidden), randn(1, 2, hidden))
    rest = False, [], 2, hidden, 1, True, False, False, True
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    real = LSTM[0](*given, *rest)
    with mode:
        fake = LSTM[0](*given, *rest)
    assert real[3].numel() > fake[3].numel() == 0
    rest = False, 2, hidden, 1, True, True, False, [], False, real[3]
    back = LSTM[1](*given, *real[:3], *real[:3], *rest)
    with mode:
        reported = LSTM[1](*given, *real[:3], *real[:3], *rest)
    memories = [{x.untyped_storage()._cdata for x in both[3:5]} for both in (back, reported)]
    assert [len(memory) for memory in memories] == [2, 1]


def test_an_unsafe_chunk_that_was_not_taken_apart_is_refused():
    with pytest.raises(RefusedError, match=r"unsafe_chunk\.default hands back memory"):
        export(lambda call, w, x, *_: call(operator.getitem, call(aten.unsafe_chunk.default, x, 2), 0))


@pytest.mark.parametrize(("read", "size"), [("_local_scalar_dense", None), ("nonzero", 0)])
def test_a_number_that_is_read_again_after_its_tensor_was_written_is_another(read, size):
    """Fake values remember such numbers: what they remember is not to make two reads one."""

    def step(between):
        graph = Graph()
        w, x, counts = (graph.placeholder(name) for name in ("w", "x", "counts"))
        own = graph.call_function(aten.clone.default, (counts,))
        y = graph.call_function(aten.mm.default, (x, w))

        def number():
            found = graph.call_function(getattr(aten, read).default, (own,))
            return found if size is None else graph.call_function(aten.sym_size.int, (found, size))

        first = number()
        if between:
            graph.call_function(aten.sub_.Tensor, (own, own))
        second = number() if between else first
        graph.output(tuple(graph.call_function(aten.mul.Tensor, (y, count)) for count in (first, second)))
        return GraphModule(torch.nn.Module(), graph)

    counts = torch.tensor(3) if size is None else torch.tensor([1, 0, 1])
    names = ["parameter 0", "input 0", "input 1"]
    sides = [
        export_graph(step(between), names, (W, X, counts), ["one", "two"], GroupTable()) for between in (True, False)
    ]
    assert [answer.verdict for answer in prove_graphs(*sides).answers] == ["PROVED", "NOT PROVED"]


def test_an_operator_that_hands_back_what_it_read_and_does_not_say_so_is_refused_though_it_is_listed(monkeypatch):
    names = dict.fromkeys(("aten.mm.default", "aten.dropout.default"), admitted.ANY)
    monkeypatch.setattr(admitted, "names", lambda mixture=admitted.ALIKE: names)
    with pytest.raises(RefusedError, match="hands back memory that it was given, and does not say so"):
        export(lambda call, w, x, *_: call(aten.dropout.default, call(aten.mm.default, x, w), 0.0, False))


def test_a_write_that_reads_its_own_memory_by_another_argument_is_refused_but_for_elementwise_ones():
    def writes(op, *others):
        def step(call, w, x, *_):
            y = call(aten.mm.default, x, w)
            call(op, y, *(y if other == "y" else other for other in others))
            return y

        return step

    export(writes(aten.mul_.Tensor, "y"))
    with pytest.raises(RefusedError, match="writes memory that it reads by another argument"):
        export(writes(aten.div_.Tensor, "y"))


def test_what_nobody_has_tried_is_refused_and_a_users_own_operator_is_believed():
    assert "not been tested against its schema" in admitted.why_not(torch.ops.quantized.add.default)
    with torch.library._scoped_library("bitproof_tests", "DEF") as library:
        library.define("twice(Tensor x) -> Tensor")
        assert admitted.why_not(torch.ops.bitproof_tests.twice.default) is None
    assert admitted.why_not(aten.add.Tensor) is None
    assert admitted.why_not(aten.empty.memory_format) is None  # known for what it is


@pytest.mark.parametrize(
    ("op", "args", "fault"),
    [
        (aten.native_batch_norm.default, (X, None, None, MEAN, VAR, True, 0.1, 1e-5), "it writes running_mean"),
        (aten.native_dropout.default, (X, 0.0, True), "it shares memory otherwise than its fake"),
        (aten.empty_like.default, (X,), "it does not give one result of the same arguments"),
        (aten._no_grad_normal_.default, (X, 0.0, 1.0), None),
        (aten.mm.default, (X, W), None),
        (aten.mul_.Tensor, (X, X), None),
    ],
)
def test_a_scan_sees_what_an_operator_does_besides(op, args, fault):
    seen = Scanned()
    with torch.no_grad():
        assert try_call(op, (args, {}), seen)
    assert any(found.startswith(fault) for found in seen.faults) if fault else not seen.faults


Y = randn(4, 6) * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("p", [1e-3, 0.5, 0.999])
def test_a_dropout_that_draws_does_what_it_says_in_every_layout(p, dtype):
    seen = Scanned()
    x = torch.randn(8, 6).to(dtype)
    ways = (x, x.t().contiguous().t(), torch.stack([x, x], -1)[..., 0], x[1:, 2:], x[:, :1].expand(8, 6), x[0, 0])
    for y in ways:
        with torch.no_grad():
            assert try_call(aten.native_dropout.default, ((y, p, True), {}), seen)
        assert admitted.why_not(aten.native_dropout.default, {"input": y, "p": p, "train": True}) is None
    assert not seen.faults


@pytest.mark.parametrize("given", [(0.0, True), (1.0, True), (0.5, False), (0.5, None), (1, True)])
def test_a_dropout_that_draws_nothing_is_not_admitted(given):
    step = lambda w, x: aten.native_dropout.default(w * x, *given)[0]  # noqa: E731
    with pytest.raises(RefusedError, match=r"native_dropout\.default is not among"):
        verdict(step, step, Y, X)


def test_dropouts_are_proved_where_they_are_drawn_in_one_order():
    drop = lambda x, p=0.5: aten.native_dropout.default(x, p, True)[0]  # noqa: E731
    both = lambda w, x: (drop(w * x), drop(w + x))  # noqa: E731
    assert verdict(lambda w, x: drop((w * x) * 2), lambda w, x: drop(w * x + w * x), Y, X) == "PROVED"
    assert verdict(both, both, Y, X) == "PROVED"
    assert verdict(both, lambda w, x: both(w, x)[::-1], Y, X) == "NOT PROVED"
    assert verdict(both, lambda w, x: tuple(reversed([drop(w + x), drop(w * x)])), Y, X) == "NOT PROVED"
    assert verdict(lambda w, x: drop(w * x), lambda w, x: drop(w * x, 0.4), Y, X) == "NOT PROVED"
    assert verdict(lambda w, x: drop(w * x), lambda w, x: drop((w * x).t()).t(), Y, X) == "NOT PROVED"
    with pytest.raises(RefusedError, match=r"native_dropout\.default is not among"):
        verdict(lambda w, x: drop((w * x)[:0]), lambda w, x: drop((w * x)[:0]), Y, X)


def test_a_scan_sees_an_undeclared_draw_a_hidden_alias_and_that_arguments_are_one_tensor():
    with torch.library._scoped_library("bitproof_scan", "FRAGMENT") as library:
        for name, own, fake in [
            ("draws", lambda x, y: x + torch.rand(()), lambda x, y: x + y),
            ("shows", lambda x, y: x.view(-1), lambda x, y: torch.empty_like(x).view(-1)),
            ("looks", lambda x, y: x * 2 if x.data_ptr() == y.data_ptr() else x + 1, lambda x, y: x + y),
            ("lies", lambda x, y: (x + y).t().contiguous().t(), lambda x, y: torch.empty_like(x)),
            ("honest", lambda x, y: x + y, lambda x, y: x + y),
        ]:
            library.define(f"{name}(Tensor x, Tensor y) -> Tensor")
            library.impl(name, own, "CPU")
            library._register_fake(name, fake)
        found = {
            name: scan(
                getattr(torch.ops.bitproof_scan, name).default,
                [((X, X + 1), {})],
                at_most=8,
                chance=random.Random(0),
            )
            for name in ("draws", "shows", "looks", "lies", "honest")
        }
    assert "it draws random numbers and is not tagged so" in found["draws"].faults
    assert "it shares memory otherwise than its fake" in found["shows"].faults
    assert "its bits depend on whether two arguments are one tensor" in found["looks"].faults
    assert "its strides are others than its fake's" in found["lies"].faults
    assert (found["honest"].ran, found["honest"].faults) == (8, {})


ROW = X[0].clone()
LISTED = ["aten.add.Tensor", "aten.mul_.Tensor", "aten.cat.default", "aten.where.self", "aten.copy_.default"]
PROMOTES = {
    "threshold_backward": ({"grad_output": X}, {"self": X, "threshold": 1}),
    "mse_loss_backward": ({"self": X}, {"grad_output": X, "target": X, "reduction": 0}),
    "huber_loss": ({"self": X}, {"target": X}),
    "native_layer_norm": ({"input": X}, {"normalized_shape": [6], "weight": ROW, "bias": ROW, "eps": 1e-5}),
}


@pytest.mark.parametrize("name", PROMOTES)
def test_an_operator_whose_fake_has_another_dtype_where_operands_have_several_is_refused(name):
    """It was PROVED that a cast to the fake's dtype, and back, changes nothing."""
    first, rest = PROMOTES[name]
    op, mixed = getattr(aten, name).default, {**{key: x.bfloat16() for key, x in first.items()}, **rest}
    with FakeTensorMode() as mode:
        fakes = {key: mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for key, x in mixed.items()}
        assert dtypes_of(op(**fakes)) != op_in_earnest(op, mixed), "or this is mended"
    assert f"{op} with tensors of bfloat16, float32 is not among" in str(admitted.why_not(op, mixed))
    assert admitted.why_not(op, {**first, **rest}) is None


def test_which_calls_mix_dtypes():
    def mixtures(name, **given):
        return admitted.mixtures_of(f"aten.{name}", given)

    assert mixtures("cat.default", tensors=[X, X]) == []
    assert mixtures("mul.Tensor", self=X, other=X.bfloat16()) == ["floats"]
    assert mixtures("mul.Tensor", self=X.bool(), other=X.long()) == ["kinds"]
    assert mixtures("addcmul.default", self=X, tensor1=X.double(), tensor2=X.bool()) == ["floats", "kinds"]
    assert mixtures("index.Tensor", self=X, indices=[None, X.long()]) == []
    assert mixtures("index.Tensor", self=X, indices=[None, X.to(torch.uint8)]) == ["kinds"]
    assert mixtures("where.self", condition=X > 0, self=X, other=X.bfloat16()) == ["floats"]


@pytest.mark.parametrize("mixture", admitted.MIXTURES)
def test_what_may_mix_dtypes_is_admitted_and_much_of_what_is_admitted_may_not(mixture):
    assert 200 < len(admitted.names(mixture)) < len(admitted.names()) / 2
    assert admitted.names(mixture).keys() <= admitted.names().keys()
    assert admitted.names(mixture).keys().isdisjoint({"aten.threshold_backward.default", "prims.cat.default"})


def test_a_call_must_lie_as_calls_of_several_dtypes_did(monkeypatch):
    lists = {"": {"aten.mul.Tensor": admitted.ANY}, "floats": {"aten.mul.Tensor": admitted.ROWS}}
    monkeypatch.setattr(admitted, "names", lambda mixture="": lists[mixture])
    assert admitted.why_not(aten.mul.Tensor, {"self": X.t(), "other": X.t()}) is None
    assert admitted.why_not(aten.mul.Tensor, {"self": X, "other": X.bfloat16()}) is None
    assert "in rows alone" in admitted.why_not(aten.mul.Tensor, {"self": X.t(), "other": X.t().bfloat16()})


ODD = {"floats": torch.bfloat16, "kinds": torch.int64}
COLUMNS = X.t().contiguous().t()


@pytest.mark.parametrize("dtype", ODD.values())
def test_tensors_of_several_dtypes_lie_in_rows_or_all_alike(dtype):
    """torch's kernels order the result's dims by the operands as they were given, some fakes by their casts."""
    odd = X.to(dtype)
    assert admitted.why_not(aten.mul.Tensor, {"self": X, "other": odd[0]}) is None
    assert admitted.why_not(aten.mul.Tensor, {"self": COLUMNS, "other": COLUMNS.to(dtype)}) is None
    assert admitted.why_not(aten.mul.Tensor, {"self": COLUMNS, "other": X}) is None
    for other in (odd, odd[0, 0], COLUMNS.to(dtype)[:, :1]):
        assert "two dtypes, all tensors in rows or" in str(why_not("mul.Tensor", self=COLUMNS, other=other))
        assert why_not("mul_.Tensor", self=COLUMNS, other=other) is None


def test_tensors_of_three_dtypes_are_refused_unless_one_only_says_which_elements_are_taken():
    given = {"self": X, "tensor1": X.double(), "tensor2": X}
    assert why_not("addcmul.default", **given) is None
    assert "two dtypes" in str(why_not("addcmul.default", **given | {"tensor2": X.bfloat16()}))
    assert "two dtypes" in str(why_not("addcmul.default", **given | {"tensor2": X.long()}))
    assert why_not("where.self", condition=X > 0, self=X, other=X.double()) is None


def why_not(name, **given):
    packet, _, overload = name.partition(".")
    return admitted.why_not(getattr(getattr(aten, packet), overload), given)


def test_a_number_of_a_kind_above_its_tensors_is_taken_of_operators_that_were_tried_with_all():
    whole = X.long()
    assert why_not("mul.Tensor", self=whole, other=0.5) is None
    assert why_not("mul.Tensor", self=X, other=2) is None
    assert why_not("lerp.Scalar", self=X, end=X, weight=2) is None
    for number in (0.5, 1j):
        refused = str(why_not("xlogy.Scalar_Other", self=whole, other=number))
        assert "xlogy.Scalar_Other with a number of another kind than its tensors of int64" in refused
    assert "number of another kind" in str(why_not("maximum.default", self=X > 0, other=2))
    assert why_not("sum.dim_IntList", self=X > 0, dim=[1]) is None, "a dim is no operand"


@pytest.mark.parametrize("mixture", admitted.MIXTURES)
@pytest.mark.parametrize("name", [*LISTED, "aten.threshold_backward.default"])
def test_a_scan_of_calls_that_mix_dtypes_agrees_with_the_list(mixture, name):
    packet, overload = name.removeprefix("aten.").split(".")
    calls = {
        "cat": ([X, X], 1),
        "where": (X > 0, X, X),
        "threshold_backward": (X, X, 1),
    }
    call = calls.get(packet, (X, X)), {}
    op = getattr(getattr(aten, packet), overload)
    seen = scan(op, [call], at_most=24, chance=random.Random(0), mixture=mixture)
    assert seen.ran >= 16
    assert bool(seen.faults) == (name not in LISTED) == (name not in admitted.names(mixture))


def attended(dtype, lie):
    """A backward call of attention, whose sums of exponentials are in float32 beside 16-bit tensors."""
    query, key, value, grad = (lie(torch.randn(2, 3, 4, 8).to(dtype)) for _ in range(4))
    out, logsumexp = aten._scaled_dot_product_flash_attention_for_cpu.default(query, key, value, 0.0, True)
    return grad, query, key, value, out, logsumexp, 0.0, True


def grouped(dtype, lie):
    """A product of matrices in groups, whose ends are in int32."""
    x, w = lie(torch.randn(16, 16).to(dtype)), lie(torch.randn(2, 16, 16).to(dtype))
    return x, w, torch.tensor([8, 16], dtype=torch.int32)


ALWAYS_MIXED = {
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": (attended, "floats"),
    "aten._grouped_mm.default": (grouped, "kinds"),
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, torch.bfloat16) for name in ALWAYS_MIXED]
    + [(next(iter(ALWAYS_MIXED)), x) for x in (torch.float16, torch.float32)],
)
@pytest.mark.parametrize("lie", [lambda x: x, lambda x: x.mT.contiguous().mT, lambda x: torch.stack([x, x])[1]])
def test_an_operator_that_always_mixes_dtypes_and_of_which_torch_has_no_such_samples_does_what_it_says(
    name, dtype, lie
):
    make, mixture = ALWAYS_MIXED[name]
    op = getattr(aten, name.split(".")[1]).default
    seen, args = Scanned(), make(dtype, lie)
    with torch.no_grad():
        ran = try_call(op, (args, {}), seen)
    assert ran and not seen.faults and not seen.fakes_fail
    assert name in admitted.names(mixture)
    given = dict(zip((x.name for x in op._schema.arguments), args, strict=False))
    assert admitted.why_not(op, given) is None


def op_in_earnest(op, given):
    with torch.utils._python_dispatch._disable_current_modes():
        return dtypes_of(op(**given))


def dtypes_of(results):
    return [x.dtype for x in results] if isinstance(results, tuple) else [results.dtype]
