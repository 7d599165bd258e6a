import builtins
import contextlib
import operator
import sys
import threading
import time

import pytest
import torch
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from bitproof.harness.graph.groups import GroupTable
from bitproof.harness.powers.proofs.prover import known_operators as known
from bitproof.harness.powers.proofs.prover.answers import prove_graphs
from bitproof.harness.powers.proofs.prover.certify import certificate_of
from bitproof.harness.powers.proofs.prover.graphs.export import RefusedError, export_graph
from bitproof.harness.powers.proofs.prover.proof_data import Tensor
from tests.harness.certificate.samples import check
from tests.harness.powers.proofs.toy_graphs import aten, c10d, names_of, randn, trace

W, X = randn(4, 6), randn(4, 6)


def exported(step, *inputs):
    module = trace(step, inputs)
    return module, lambda: export_graph(module, names_of(inputs), inputs, ["out"], GroupTable())


def test_a_call_is_written_with_its_arguments_by_name_and_without_those_left_at_their_default():
    _, export = exported(lambda w, x: torch.add(w, x, alpha=2).transpose(0, 1), W, X)
    *_, add, transpose = export().calls
    assert (add.op, add.args) == (
        "aten.add.Tensor",
        (("self", ("node", 0)), ("other", ("node", 1)), ("alpha", ("float", (2.0).hex()))),
    )
    assert (transpose.op, transpose.args) == ("view", (("self", ("node", 2)),)), "its layout says what it shows"
    assert transpose.value == Tensor("float32", "cpu", (6, 4), (1, 6), 0, add.value.storage)
    assert export().outputs == (("out", 3),)


def rows_where(w, x):
    """Rows of w, whose number and places are read from data."""
    places = torch.arange(x.sum().item())
    return [w.index_select(0, torch.searchsorted(x, places, right=True) % 3) * 2]


@contextlib.contextmanager
def frames_kept():
    """Meanwhile another thread holds this one's frames, as a sampling profiler does."""
    own, ended, held = threading.get_ident(), threading.Event(), []

    def sample():
        while not ended.wait(1e-4):
            frame, stack = sys._current_frames().get(own), []
            while frame is not None:
                stack.append(frame)
                frame = frame.f_back
            held[:] = [*held[-3:], stack]

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    sampler = threading.Thread(target=sample)
    sampler.start()
    try:
        yield
    finally:
        ended.set()
        sampler.join()
        sys.setswitchinterval(before)


def test_what_torch_detaches_because_something_holds_it_is_itself():
    """autograd detaches what anybody else has, so that a profiler's thread changes what is traced."""
    x = torch.tensor([2, 3, 4])

    def graph():
        module = make_fx(rows_where, tracing_mode="symbolic", _allow_non_fake_inputs=True)(W, x)
        return module, export_graph(module, names_of((W, x)), (W, x), ["out"], GroupTable())

    def detached(module):
        return [node.target for node in module.graph.nodes].count(aten.detach.default)

    plain, one = graph()
    for _ in range(50):  # on a busy machine the thread may have no turn
        with frames_kept():
            sampled, other = graph()
        if detached(sampled) > detached(plain):
            break
    assert detached(plain) < detached(sampled), "or this shows nothing"
    assert not [call for call in (*one.calls, *other.calls) if "detach" in call.op]
    assert [x.verdict for x in prove_graphs(one, other).answers] == ["PROVED"]


def test_what_is_detached_and_written_in_place_is_written():
    def written(w, x):
        y = w * x
        aten.detach.default(y).add_(x)
        return y + aten.alias.default(w)

    _, export = exported(written, W, X)
    _, other = exported(lambda w, x: (w * x).add_(x) + w, W, X)
    _, unlike = exported(lambda w, x: w * x + w, W, X)
    graphs = export(), other(), unlike()
    assert [prove_graphs(graphs[0], x).answers[0].verdict for x in graphs[1:]] == ["PROVED", "NOT PROVED"]


def test_what_metadata_say_is_not_believed():
    module, export = exported(lambda w, x: (w * x).t(), W, X)
    honest = export()
    for node in module.graph.nodes:
        node.meta["val"] = torch.empty(1)
    assert export() == honest


def test_an_alias_that_no_schema_shows_shares_memory():
    summed = lambda w, x: c10d.wait_tensor(c10d.all_reduce(aten._unsafe_view(w, [24]), "sum", "g"))[1:]  # noqa: E731
    _, export = exported(summed, W, X)
    *_, view, launch, wait, shown = export().calls
    assert view.value.storage == 0
    assert launch.value.storage == wait.value.storage == shown.value.storage != 0
    assert (view.op, wait.op, shown.op) == ("view", "_c10d_functional.wait_tensor.default", "view")


def test_a_graph_that_returns_or_takes_something_else_is_refused():
    module, _ = exported(lambda w, x: (w, x), W, X)
    with pytest.raises(RefusedError, match="another number of outputs"):
        export_graph(module, names_of((W, X)), (W, X), ["out"], GroupTable())
    with pytest.raises(RefusedError, match="takes more inputs than the step has"):
        export_graph(module, ["parameter 0"], (W,), ["a", "b"], GroupTable())


def test_taking_no_gradients_of_captured_tensors_is_no_call():
    """Else a checker, which knows of no call without a result that leaves memory alone, distrusts what it reads."""
    module, export = exported(lambda w, x: w * x, W, X)
    plain = export()
    [product] = [node for node in module.graph.nodes if node.op == "call_function"]
    with module.graph.inserting_after(product):
        for nothing in ((), [], None):
            module.graph.call_function(operator.getitem, (((product,), nothing), 1))
    assert export() == plain


def test_a_call_of_what_is_no_operator_is_refused():
    module, export = exported(lambda w, x: w * x, W, X)
    [node] = [node for node in module.graph.nodes if node.op == "call_function"]
    node.target = torch.mul
    with pytest.raises(RefusedError, match="which is no operator"):
        export()


@pytest.mark.parametrize(("target", "args"), [(operator.add, (1, 1)), (time.time_ns, ()), (operator.getitem, None)])
def test_numbers_are_arithmetic_and_nothing_else(target, args):
    """What any other function gives now it need not give in another step."""
    module, export = exported(lambda w, x: w * x * 2, W, X)
    [first, second] = [node for node in module.graph.nodes if node.op == "call_function"]
    with module.graph.inserting_before(second):
        second.args = (first, module.graph.call_function(target, (first, 0) if args is None else args))
    if target is operator.add:
        assert export().calls[-1].args[1] == ("other", 2)
    elif target is operator.getitem:
        assert prove_graphs(export(), export()).verdict == "REFUSED"
    else:
        with pytest.raises(RefusedError, match="which is no operator"):
            export()


ran = []


def counted():
    ran.append(1)
    return 2


@pytest.mark.parametrize(
    ("target", "args"),
    [
        (torch.set_flush_denormal, (False,)),
        (torch.get_num_threads, ()),
        (builtins.eval, ("1 + 1",)),
        (builtins.len, ([1, 2],)),
        (counted, ()),
    ],
)
def test_a_function_that_gives_a_number_is_refused_before_it_is_run(target, args):
    """It may change what others compute, though nobody reads its number: flushing denormals does."""
    module, export = exported(lambda w, x: w * x, W, X)
    with module.graph.inserting_before(module.graph.output_node()):
        module.graph.call_function(target, args)
    with pytest.raises(RefusedError, match="which is no operator"):
        export()
    assert not ran


@pytest.mark.parametrize(
    ("target", "args", "is_check"),
    [
        (aten._assert_scalar.default, (True, "holds"), True),
        (aten.manual_seed.default, (0,), False),
        (aten.set_grad_enabled.default, (False,), False),
    ],
)
def test_a_call_that_gives_nothing_is_there_to_check_or_is_refused(target, args, is_check):
    module, export = exported(lambda w, x: w * torch.rand_like(x), W, X)
    honest = export()
    with module.graph.inserting_before(module.graph.output_node().args[0][0]):
        module.graph.call_function(target, args)
    if is_check:
        assert export() == honest
    else:
        with pytest.raises(RefusedError, match="not among the operators"):  # and it is not run on fake values
            export()


def test_random_calls_that_no_tag_shows_are_known_by_name(monkeypatch):
    _, export = exported(lambda w, x: w * x.sin(), W, X)
    randoms = lambda: [call.random for call in export().calls[2:]]  # noqa: E731
    assert randoms() == [False, False]
    monkeypatch.setattr(known, "DRAWS", {*known.DRAWS, "aten.sin.default"})
    assert randoms() == [True, False]


@pytest.mark.parametrize("returned", [None, 3, "a size"])
def test_an_output_that_is_no_tensor_is_refused(returned):
    module, export = exported(lambda w, x: w * x, W, X)
    output = module.graph.output_node()
    if returned == "a size":
        with module.graph.inserting_before(output):
            returned = module.graph.call_function(aten.sym_size.int, (output.args[0][0], 0))
    output.args = ([returned],)
    with pytest.raises(RefusedError, match="out is no tensor"):
        export()


def test_a_call_that_cannot_run_is_refused():
    module, export = exported(lambda w, x: w * x, W, X)
    [node] = [node for node in module.graph.nodes if node.op == "call_function"]
    node.target = aten.mm.default
    with pytest.raises(RefusedError, match="fails on fake values"):
        export()


def test_a_constant_is_reported_by_its_bytes():
    def times(number):
        table = torch.full((6,), number)
        module = make_fx(lambda w, x: [w * x * table])(W, X)
        return export_graph(module, names_of((W, X)), (W, X), ["out"], GroupTable())

    assert prove_graphs(times(2.0), times(2.0)).verdict == "PROVED"
    assert prove_graphs(times(2.0), times(3.0)).verdict == "NOT PROVED"


def test_a_write_to_a_constant_is_an_output_that_is_refused():
    """The next step finds it changed, which nothing shows that this step returns."""
    table = torch.ones(6)

    def times(*copied):
        module = make_fx(lambda w, x: [w * x * table])(W, X)
        [read] = module.graph.find_nodes(op="get_attr")
        with module.graph.inserting_before(module.graph.output_node()):
            written = module.graph.call_function(aten.clone.default, (read,)) if copied else read
            module.graph.call_function(aten.add_.Tensor, (written, 1.0))
        return export_graph(module, names_of((W, X)), (W, X), ["out"], GroupTable())

    assert prove_graphs(times("copied"), times("copied")).verdict == "PROVED"
    found = prove_graphs(times("copied"), times())
    assert [answer.verdict for answer in found.answers] == ["PROVED", "REFUSED"]
    assert "is read after `add__tensor` wrote a part of its memory" in str(found.answers[1].reason)
    assert check(certificate_of("a constant written", found)) == {"PROVED": 1, "REFUSED": 1}


def test_a_size_that_is_no_sum_of_products_is_refused_naming_the_node():
    graph = torch.fx.Graph()
    counts = graph.placeholder("counts")
    number = graph.call_function(aten._local_scalar_dense.default, (counts,))
    larger = graph.call_function(torch.sym_max, (number, 1))
    graph.output((graph.call_function(aten.arange.default, (larger,)),))
    counted = torch.tensor(3)
    with pytest.raises(RefusedError, match=r"a size that is no sum of products: Max\(1, u0\) \(`arange_default`\)"):
        export_graph(GraphModule(torch.nn.Module(), graph), ["input 0"], (counted,), ["out"], GroupTable())
