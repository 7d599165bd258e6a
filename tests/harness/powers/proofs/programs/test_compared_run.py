"""Functions whose traced graph is not what they do: refused, by what differs. tests/benchmarks/unlike_traces.py has
four hundred more."""

import contextlib
import copy
import dataclasses
import weakref

import numpy
import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensor
from torch.fx import symbolic_trace
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

import bitproof
from bitproof import PassError
from bitproof.harness.powers.proofs.prover.evaluate import same_bits
from tests.harness.powers.proofs.toy_graphs import randn

X = randn(4, 6)


def layer():
    torch.manual_seed(0)
    return nn.Linear(6, 6)


def reason(f, g, *inputs):
    found = bitproof.prove(f, g, *inputs)
    assert found.verdict == "REFUSED", found
    return found.reason


def test_a_product_is_traced_as_eager_computes_it():
    """The Python dispatcher would make a `mv` of it, which has other bits."""

    def by_rows(a, b):
        rows = b.transpose(1, 2).clone(memory_format=torch.contiguous_format).view(-1, a.shape[0])
        return torch.mv(rows, a).view(b.shape[0], b.shape[2])

    a, b = randn(33), randn(2, 33, 7)
    assert not same_bits(a @ b, by_rows(a, b))
    found = bitproof.prove(lambda a, b: a @ b, by_rows, a, b)
    assert found.verdict == "NOT PROVED" and found.differs
    assert bitproof.prove(lambda a, b: a @ b, lambda a, b: torch.matmul(a, b), a, b).verdict == "PROVED"


def rated(rate):
    def step(net, x):
        loss = net(x).square().mean()
        gradient = torch.autograd.grad(loss, net.weight)[0]
        net.weight.data = net.weight.data - rate * gradient
        return loss.detach()

    return step


def test_memory_that_is_exchanged_is_refused_by_the_parameter():
    text = reason(rated(0.1), rated(0.2), layer(), X)
    assert text.startswith("of the reference, the graph is not what the program does: parameter weight is left with")


def backward(factor, clear=False):
    def step(net, x):
        (factor * net(x).square().mean()).backward()
        if clear:
            net.zero_grad()
        return x * 2

    return step


def test_gradients_that_are_left_are_outputs():
    equal = bitproof.prove(backward(1), backward(1), layer(), X)
    assert equal.verdict == "PROVED"
    assert "written gradient of parameter weight" in {answer.output for answer in equal.answers}
    other = bitproof.prove(backward(1), backward(2), layer(), X)
    assert other.verdict == "NOT PROVED" and other.differs


def test_gradients_that_one_side_leaves_are_refused():
    assert reason(backward(1), backward(1, clear=True), layer(), X) == (
        "only the reference leaves something as gradient of parameter weight: end both by zero_grad(), "
        "or leave it in both, in what a call leaves"
    )


def test_gradients_that_are_there_before_are_inputs():
    net = layer()
    net(X).sum().backward()
    assert bitproof.prove(backward(1), backward(1), net, X).verdict == "PROVED"

    def replaced(net, x):
        net.zero_grad()
        return backward(1)(net, x)

    assert bitproof.prove(backward(1), replaced, net, X).verdict != "PROVED"
    assert bitproof.prove(lambda n, x: n(x), lambda n, x: n(x), net, X).verdict == "PROVED", "which nobody reads"


@dataclasses.dataclass
class Out:
    value: torch.Tensor


def test_outputs_that_are_objects_are_refused():
    text = reason(lambda x: (x, Out(x + 1)), lambda x: (x, Out(x + 2)), X)
    assert text == "output 1 is a Out, neither a tensor nor a plain value: return what it holds, in the outputs"


def test_outputs_under_other_keys_are_refused():
    text = reason(lambda x: {"a": x, "b": x + 1}, lambda x: {"b": x, "a": x + 1}, X)
    assert text == "output 0 is returned as ['a'] by the reference and as ['b'] by the candidate, in the outputs"
    assert bitproof.prove(lambda x: {"a": x}, lambda x: [x], X).verdict == "PROVED", "by position"


@pytest.mark.parametrize("seed", [0, 1])
def test_a_seed_that_is_set_within_is_refused(seed):
    def seeded(x):
        torch.manual_seed(seed)
        return functional.dropout(x, 0.5)

    assert "the state of torch's random number generator" in reason(seeded, seeded, X)


def appending(factor):
    def f(x, kept):
        kept.append(x * factor)
        return x + 1

    return f


def test_what_is_put_into_containers_is_an_output():
    kept = []
    assert bitproof.prove(appending(2), appending(2), X, kept).verdict == "PROVED"
    found = bitproof.prove(appending(2), appending(3), X, kept)
    assert found.verdict == "NOT PROVED" and found.differs
    assert "argument 1" in reason(appending(2), lambda x, kept: x + 1, X, kept)
    assert kept == [], "which the proof has copies of"


def test_fast_paths_that_tracing_turns_off_are_refused(monkeypatch):
    monkeypatch.setattr(torch.backends.mha, "_is_fastpath_enabled", True)  # whatever earlier tests left
    torch.manual_seed(0)
    encoder = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0).eval().requires_grad_(False)
    x = randn(3, 7, 16)
    fast = encoder(x)
    monkeypatch.setattr(torch.backends.mha, "_is_fastpath_enabled", False)
    slow = encoder(x)
    monkeypatch.setattr(torch.backends.mha, "_is_fastpath_enabled", True)
    found = bitproof.prove(encoder, encoder, x)
    if torch.equal(fast, slow):  # no fast path on this machine, or in the state that other tests left
        assert found.verdict == "PROVED", found
    else:
        assert "output 0 has other bits" in str(found.reason), found


def test_one_tensor_given_twice_is_one_to_the_trace():
    same = lambda x, y: x + y if x is y else x - y  # noqa: E731
    assert bitproof.prove(same, lambda x, y: x - y, X, X).verdict == "NOT PROVED"
    assert bitproof.prove(same, lambda x, y: x + x, X, X).verdict == "PROVED"
    assert bitproof.prove(same, lambda x, y: x - y, X, X.clone()).verdict == "PROVED"
    graph = make_fx(lambda x, y: x + y)(X, X.clone())
    assert bitproof.prove(same, graph, X, X).verdict == "PROVED"


def replaced_forward(module):
    module.forward = lambda x: x * 5


def hooked(module):
    module.register_forward_hook(lambda module, args, out: out * 5)


def of_other_code(module):
    module.graph.on_generate_code(lambda old: lambda body: [line.replace("2", "5") for line in body])
    module.recompile()


def stale(module):
    [node] = module.graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor)
    node.args = (node.args[0], 3)


@pytest.mark.parametrize("change", [replaced_forward, hooked, of_other_code, stale])
def test_a_graph_module_that_runs_something_else_is_not_proved(change):
    one, other = (make_fx(lambda x: x * 2)(X) for _ in range(2))
    assert bitproof.prove(one, other, X).verdict == "PROVED"
    change(one)
    assert bitproof.prove(one, other, X).verdict != "PROVED"
    if change is stale:
        other = copy.deepcopy(one)  # of the same graph, whose code is made anew
        other.recompile()
        assert "the graph is not what the program does" in reason(one, other, X)
    else:
        with pytest.raises(PassError, match="a graph that is run with"):
            bitproof.keeps_bits(lambda module: None, inputs=[X])(one)


def test_a_hook_on_a_gradient_is_refused():
    net = layer()
    net.weight.register_hook(lambda gradient: gradient * 3)
    assert reason(backward(1), backward(1), net, X) == (
        "parameter weight has hooks on its gradient, which no graph shows, in the inputs"
    )


def aligned(n):
    raw = numpy.zeros(4 * n + 64, dtype=numpy.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + 4 * n].view(numpy.float32)


def test_tensors_over_one_array_share_memory():
    array = aligned(64)
    f, g = (lambda x, y: (x.add_(1), y * 2)[1]), (lambda x, y: (y * 2, x.add_(1))[0])
    for other in (array, array[16:]):
        assert "share memory that a program writes" in reason(f, g, torch.from_numpy(array), torch.from_numpy(other))
    assert "line of 64 bytes" in reason(f, g, torch.from_numpy(array[1:]), X)


class Counting(torch.optim.SGD):
    """Its rate falls by a count that it keeps in a list."""

    def __init__(self, parameters):
        super().__init__(parameters, 0.1)
        self.count = [0]

    @torch.no_grad()
    def step(self):
        self.count[0] += 1
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad * (0.1 / self.count[0]))


def test_a_count_in_a_list_is_reported_of_the_next_step():
    def step(net, held, x):
        net(x).square().mean().backward()
        held.step()
        net.zero_grad()

    net = layer()
    found = bitproof.prove(step, step, net, Counting(net.parameters()), X)
    assert (found.verdict, found.induction.holds) == ("PROVED", False)
    assert found.induction.reason == "the step changes what is no tensor: optimizer 0 count[0]"


@pytest.mark.filterwarnings("ignore:`torch.distributed.reduce_op` is deprecated")  # vars(torch) leads to it
def test_a_second_step_that_is_another_is_refused():
    """Nothing that the first changes shows what the second does: it is seen where it runs.

    Which of the two steps a trace is of depends on how often the module ran before: the two may be seen to differ, too.
    """

    class Hidden(nn.Module):
        def forward(self, x):
            return x * (2 if self.calls() else 3)

        def calls(self):
            found = len(vars(torch).setdefault("_of_a_test", []))
            vars(torch)["_of_a_test"].append(0)
            return found % 2

    try:
        found = bitproof.prove(Hidden(), Hidden(), X)
        assert "it changes the variable torch._of_a_test" in str(found.reason), found
    finally:
        vars(torch).pop("_of_a_test")


@pytest.mark.parametrize(
    ("switch", "name"),
    [
        (lambda: torch.set_num_threads(1 + torch.get_num_threads() % 2), "num_threads"),
        (lambda: torch.set_float32_matmul_precision("medium"), "float32_matmul_precision"),
        (lambda: torch.set_flush_denormal(True), "flush_denormal"),
        (lambda: torch.set_default_dtype(torch.float64), "default_dtype"),
        (lambda: torch.set_autocast_dtype("cpu", torch.float16), "autocast_dtype_cpu"),
    ],
)
def test_a_switch_that_is_left_is_refused_and_set_back(switch, name):
    before = torch.get_num_threads(), torch.get_default_dtype()

    def f(x):
        found = x * 2
        switch()
        return found

    assert name in reason(f, f, X)
    assert (torch.get_num_threads(), torch.get_default_dtype()) == before
    with pytest.raises(PassError, match=name):
        bitproof.keeps_bits(lambda graph: switch())(make_fx(lambda x: x * 2, tracing_mode="fake")(X))
    assert (torch.get_num_threads(), torch.get_default_dtype()) == before


def test_a_switch_that_is_set_for_some_operators_is_refused():
    def f(x):
        y, before = x.exp(), torch.get_num_threads()
        torch.set_num_threads(before + 1)
        try:
            return y.sum()
        finally:
            torch.set_num_threads(before)

    assert "it sets num_threads to" in reason(f, f, X)


def test_a_program_that_catches_the_refusal_is_refused():
    def f(x):
        y, before = x.exp(), torch.get_num_threads()
        torch.set_num_threads(before + 1)
        try:
            return y.sum()
        except Exception:
            return y
        finally:
            torch.set_num_threads(before)

    assert "it sets num_threads to" in reason(f, torch.exp, torch.empty(4, 6, device="meta"))


def test_a_draw_that_nothing_reads_is_no_equal_program():
    one, other = (lambda x: x * 1), (lambda x: (torch.rand(3), x * 1)[1])
    assert "leave the random generator in other states" in reason(one, other, X)


class Counter:
    count = 0


COUNT = 0


def test_class_attributes_and_globals_that_a_call_changes_are_refused():
    def of_class(x):
        Counter.count += 1
        return x + 1

    def named(x):
        global COUNT
        COUNT += 1
        return x + 1

    def unnamed(x):
        globals()["NEW"] = globals().get("NEW", 0) + 1
        return x + 1

    assert "it changes Counter.count" in reason(of_class, torch.exp, X)
    assert "it changes the variable COUNT" in reason(named, torch.exp, X)
    assert "it changes the variable NEW" in reason(unnamed, torch.exp, X)


def test_what_a_weak_reference_leads_to_is_copied_and_compared():
    kept = Counter()
    kept.own, weak = 0, weakref.ref(kept)

    def f(x, kept):
        weak().own += 1
        return x + 1

    assert "only the reference leaves something as argument 1.own" in reason(f, lambda x, kept: x + 1, X, kept)
    assert kept.own == 0


def test_a_hook_that_is_left_on_a_gradient_is_an_effect():
    def f(net, x):
        net.weight.register_hook(lambda gradient: gradient * 2)
        return net(x)

    assert "parameter weight is" in reason(f, lambda net, x: net(x), nn.Linear(6, 6), X)


def test_an_input_with_a_history_is_refused():
    weight = torch.ones(6, requires_grad=True)
    found = reason(lambda x: x.sum().backward(), lambda x: (2 * x).sum().backward(), X * weight)
    assert "input 0 was computed (MulBackward0)" in found


def test_a_copy_of_a_view_is_a_view():
    def f(x):
        return x + (x._base is not None)

    assert "the graph is not what the program does" in reason(f, lambda x: x + False, torch.ones(64)[:16])


LARGE = torch.ones(1).expand(21_000_000)


def test_what_is_too_large_is_said_not_to_run():
    found = bitproof.prove(torch.exp, torch.exp, LARGE)
    assert (found.verdict, found.not_run) == ("PROVED", "the program is too large to be run here")
    assert str(found).split("\n")[1] == (
        "  not run, the program is too large to be run here: that the graphs are what the programs do is assumed"
    )
    assert bitproof.prove(torch.exp, torch.exp, X).not_run is None


@pytest.mark.parametrize(
    "read",
    [lambda x: x.sum().item() > 0, lambda x: bool(x.sum() > 0), lambda x: x.numpy()[0] > 0, lambda x: x.data_ptr() > 0],
    ids=["item", "bool", "numpy", "data_ptr"],
)
def test_a_program_that_is_not_run_is_refused_at_a_call_that_only_its_trace_fails_at(read):
    def f(x):
        with contextlib.suppress(Exception):
            if read(x):
                return x + 1
        return x * 2

    found = reason(f, lambda x: x * 2, LARGE)
    assert "while it is traced, and nothing shows what it does then: the program is too large" in found


def test_what_has_no_values_runs_on_drawn_ones():
    with torch.device("meta"):
        net, tied = nn.Linear(6, 6), nn.Linear(6, 6)
    tied.weight = net.weight
    meta = torch.empty(4, 6, device="meta")
    found = bitproof.prove(net, lambda x: x * 1, meta)
    assert found.verdict == "REFUSED"
    found = bitproof.prove(net, net, meta)
    assert (found.verdict, found.not_run, found.evaluated) == ("PROVED", None, 1)
    assert bitproof.prove(lambda a, b, x: a(b(x)), lambda a, b, x: a(b(x)), net, tied, meta).verdict == "PROVED"

    def other_when_traced(x):
        return x * 2 if type(x) is torch.Tensor else x * 3

    assert "the graph is not what" in reason(other_when_traced, other_when_traced, meta)
    assert not isinstance(net.weight, FakeTensor) and net.weight.is_meta


def test_a_trace_leaves_nothing_in_what_it_was_given():
    class Keeps(nn.Linear):
        def forward(self, x):
            self.last = super().forward(x)
            return self.last

    net = Keeps(6, 6)
    traced = symbolic_trace(nn.Sequential(nn.ReLU()))
    before = {*vars(net)}
    bitproof.prove(net, net, X)
    bitproof.prove(traced, nn.ReLU(), X)
    assert {*vars(net)} == before and net.weight.grad is None


def test_a_value_that_a_new_output_carries_is_refused_but_not_that_of_an_input():
    def plain(x):
        return x * 2, x

    def carrying(x):
        y = x * 2
        y.aux = x * 3
        return y, x

    assert "output 0 carries aux, which is compared with nothing: return it" in reason(plain, carrying, X)
    noted = X.clone()
    noted.aux = 1
    assert bitproof.prove(plain, plain, noted).verdict == "PROVED"


def test_a_gradient_that_a_new_output_carries_is_refused():
    def made(x, *, factor):
        y = nn.Parameter(x * 2)
        y.grad = x * factor
        return y

    def one(x):
        return made(x, factor=2)

    def other(x):
        return made(x, factor=3)

    assert "output 0 carries grad, which is compared with nothing: return it" in reason(one, other, X)
