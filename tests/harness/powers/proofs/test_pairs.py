"""Forty pairs of functions, modules and exported programs: twenty equal in every bit, twenty not."""

import copy

import pytest
import torch
from torch import nn
from torch.export import Dim, export
from torch.fx import symbolic_trace
from torch.utils import deterministic

import bitproof
from tests.harness.powers.proofs.toy_graphs import randn
from tests.sweeps import sweep

X, Y = randn(4, 6), randn(4, 6) * 3
ROWS = ({0: Dim("rows", max=64)}, {0: Dim("rows", max=64)})


class Net(nn.Module):
    def __init__(self, bias: bool = True, act=torch.relu) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.norm, self.down = nn.Linear(6, 8, bias=bias), nn.LayerNorm(8), nn.Linear(8, 6)
        self.register_buffer("seen", torch.zeros(6))
        self.act = act

    def forward(self, x):
        y = self.down(self.act(self.norm(self.up(x))))
        self.seen.add_(y.detach().sum(0))
        return x + y


class Commuted(Net):
    def forward(self, x):
        y = self.down(self.act(self.norm(self.up(x))))
        self.seen.copy_(self.seen + y.detach().sum(0))
        return y + x


class Uncounted(Net):
    def forward(self, x):
        return x + self.down(self.act(self.norm(self.up(x))))


def trained(net, x, scale=1.0):
    loss = net(x).square().sum()
    loss.backward()
    gradients = [p.grad * scale if scale != 1.0 else p.grad for p in net.parameters()]
    net.zero_grad()  # gradients that one side leaves are a difference
    return loss, gradients


def by_grad(net, x):
    loss = net(x).square().sum()
    return loss, list(torch.autograd.grad(loss, list(net.parameters())))


def written(x, y):
    x.add_(y)
    return x.exp()


def half(x):
    return x.bfloat16()


NET = Net()
EQUAL = {
    "a function and itself": (lambda x, y: (x @ y.t()).softmax(-1), lambda x, y: (x @ y.t()).softmax(-1)),
    "operands of a sum": (lambda x, y: x + y, lambda x, y: y + x),
    "operands of a product": (lambda x, y: x * y, lambda x, y: y * x),
    "rows of a sum": (lambda x, y: (x + y)[:2], lambda x, y: x[:2] + y[:2]),
    "halves joined": (lambda x, y: x * y, lambda x, y: torch.cat([x[:2] * y[:2], x[2:] * y[2:]])),
    "transposed twice": (lambda x, y: x.t().t() - y, lambda x, y: x - y),
    "a copy": (lambda x, y: (x - y).clone().exp(), lambda x, y: (x - y).exp()),
    "in place or not": (lambda x, y: (x * y).add_(y), lambda x, y: x * y + y),
    "a view that is written": (lambda x, y: written(x.clone(), y), lambda x, y: (x + y).exp()),
    "an input that is written": (written, written),
    "stacked": (lambda x, y: torch.stack([x, y])[1] - x, lambda x, y: y - x),
    "a repeated operand": (lambda x, y: x + y[:1], lambda x, y: x + y[:1].expand(4, 6)),
    "casts of rows": (lambda x, y: half(x - y)[1:], lambda x, y: half(x[1:] - y[1:])),
    "open rows": (lambda x, y: (x * y).exp() + x, lambda x, y: x + (y * x).exp()),
    "a module and itself": (NET, NET, X),
    "a module and its trace": (NET, symbolic_trace(NET), X),
    "another form of a module": (NET, Commuted(), X),
    "backward and grad": (trained, by_grad, NET, X),
    "exported twice": (export(Uncounted(), (X,)), export(Uncounted(), (X,))),
    "exported with open rows": (lambda x, y: (x - y).exp() * x, lambda x, y: x * (x - y).exp()),
}
UNEQUAL = {
    "sums regrouped": (lambda x, y: (x + y) + 0.1 * x, lambda x, y: x + (y + 0.1 * x)),
    "operands of a difference": (lambda x, y: x - y, lambda x, y: y - x),
    "other rows": (lambda x, y: (x + y)[:2], lambda x, y: (x + y)[1:3]),
    "halves in another order": (lambda x, y: x * y, lambda x, y: torch.cat([x[2:] * y[2:], x[:2] * y[:2]])),
    "nearly one": (lambda x, y: x.clone(), lambda x, y: x * 1.0000001),
    "a cast and back": (lambda x, y: x - y, lambda x, y: half(x - y).float()),
    "written twice": (lambda x, y: (x * y).add_(y), lambda x, y: (x * y).add_(y).add_(y)),
    "an input that is left": (written, lambda x, y: (x + y).exp()),
    "an input that is written otherwise": (written, lambda x, y: x.sub_(y).exp()),
    "quotient and product": (lambda x, y: x / 3.0, lambda x, y: x * (1 / 3.0)),
    "a root": (lambda x, y: x.abs().sqrt(), lambda x, y: x.abs().pow(0.499)),
    "distributed": (lambda x, y: x * (x + y), lambda x, y: x * x + x * y),
    "a sum of exponentials": (lambda x, y: torch.logsumexp(x, 0), lambda x, y: x.exp().sum(0).log()),
    "another epsilon": (
        lambda x, y: torch.rms_norm(x, [6], eps=1e-6),
        lambda x, y: torch.rms_norm(x, [6], eps=1e-5),
    ),
    "open rows": (lambda x, y: x - y, lambda x, y: y - x),
    "another activation": (Net(), Net(act=torch.nn.functional.silu), X),
    "a buffer that is not counted": (NET, Uncounted(), X),
    "gradients twice as large": (trained, lambda net, x: trained(net, x, 2.0), NET, X),
    "another constant": (lambda x, y: x * torch.tensor(0.5), lambda x, y: x * torch.tensor(0.25)),
    "outputs exchanged": (lambda x, y: (x.exp(), y.exp()), lambda x, y: (y.exp(), x.exp())),
}


def judged(name, pair):
    one, other, *inputs = pair
    open_rows = ROWS if "open rows" in name else None
    return bitproof.prove(one, other, *(inputs or (X, Y)), dynamic_shapes=open_rows)


def test_there_are_twenty_of_each():
    assert (len(EQUAL), len(UNEQUAL)) == (20, 20)


@pytest.mark.parametrize(
    "name", sweep(EQUAL, "halves joined", "an input that is written", "a copy", "backward and grad", "open rows")
)
def test_equal_pairs_are_proved_and_computed(name):
    found = judged(name, EQUAL[name])
    assert (found.verdict, found.reason, found.differs) == ("PROVED", None, False)
    assert found.evaluated == len(found.answers) > 0


@pytest.mark.parametrize(
    "name", sweep(UNEQUAL, "sums regrouped", "nearly one", "an input that is left", "a buffer that is not counted")
)
def test_unequal_pairs_are_not_proved_and_seen_to_differ(name):
    found = judged(name, UNEQUAL[name])
    assert found.verdict == "NOT PROVED", found.reason
    assert found.differs


def test_four_lines_from_import_to_an_answer():
    scope = {}
    exec(
        "import torch, bitproof\n"
        "x = torch.randn(4, 6)\n"
        "found = bitproof.prove(lambda x: x.exp()[:2], lambda x: x[:2].exp(), x)\n"
        "verdict = found.verdict\n",
        scope,
    )
    assert scope["verdict"] == "NOT PROVED"  # kernels may compute rows of another number otherwise
    assert not scope["found"].differs


def test_what_is_printed_shows_the_calls_that_differ_and_nothing_else():
    x = randn(4, 6)
    assert str(bitproof.prove(lambda x: x + x, lambda x: 2 * x, x)) == (
        "PROVED: 1 PROVED of 1 outputs; 1 of 1 computed and found so"
    )
    first, output, *rest = str(bitproof.prove(lambda x: (x + 1) * 3, lambda x: x * 3 + 3, x)).split("\n")
    assert first.startswith("NOT PROVED: 1 NOT PROVED of 1 outputs") and first.endswith("; 1 differs on an input tried")
    assert output == "  output 0: NOT PROVED: differs on an input tried"
    assert rest[0].startswith("    seen to differ: ") and "only the candidate computes aten.mul.Tensor" in rest[2]
    assert str(bitproof.prove(lambda x: x[0].item(), lambda x: x, x)).startswith("REFUSED: ")


def test_not_proved_says_whether_the_two_differ_or_no_rule_proves_them_equal():
    """Rows of an exponential, in two halves: equal here, but no rule states that a row stands alone."""
    differs = bitproof.prove(lambda x: x.exp(), lambda x: x.exp() * 1.5, randn(4, 6))
    unknown = bitproof.prove(lambda x: x.exp(), lambda x: torch.cat([x[:2].exp(), x[2:].exp()]), randn(4, 6))
    answers = differs.answers[0], unknown.answers[0]
    assert [answer.meaning for answer in answers] == [
        "differs on an input tried",
        "no rule proves them equal; they agreed on every input tried (3)",
    ]
    assert (differs.differs, unknown.differs) == (True, False)
    first, output, *_ = str(unknown).split("\n")
    assert first.endswith("; of 1 no rule proves them equal; they agreed on every input tried (3)")
    assert output == "  output 0: NOT PROVED: no rule proves them equal; they agreed on every input tried (3)"


def test_sizes_that_are_open_are_reported_with_their_bounds():
    found = judged("open rows", EQUAL["open rows"])
    assert found.bounds == ("dim 0 of input 0: 2 to 64",)


def test_an_open_and_a_fixed_size_are_refused_by_the_input():
    sides = [export(nn.ReLU(), (X,), dynamic_shapes=shapes) for shapes in (None, ({0: Dim("rows")},))]
    found = bitproof.prove(*sides)
    assert found.verdict == "REFUSED"
    assert "input 0 is float32 [4, 6]" in found.reason


def test_parameters_of_other_bits_are_refused_by_name():
    other = copy.deepcopy(NET)
    with torch.no_grad():
        other.down.bias[0] += 1
    found = bitproof.prove(NET, other, X)
    assert (found.verdict, "parameter down.bias holds other bits" in found.reason) == ("REFUSED", True)


class Normed(nn.Sequential):
    """A convolution, of whose input nobody asks a gradient, and a batch norm that counts what it sees."""

    def __init__(self, momentum: float = 0.1) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, momentum=momentum), nn.ReLU())


def test_a_training_step_with_a_batch_norm_is_proved_with_its_statistics():
    images = randn(2, 3, 8, 8)
    found = bitproof.prove(trained, by_grad, Normed(), images)
    assert (found.verdict, found.evaluated) == ("PROVED", 8), found.answers
    assert {"written buffer 1.running_mean", "written buffer 1.running_var"} < {x.output for x in found.answers}
    other = bitproof.prove(Normed(), Normed(momentum=0.2), images)
    assert other.verdict == "NOT PROVED"
    assert {x.output for x in other.answers if x.witness} == {f"written buffer 1.running_{x}" for x in ("mean", "var")}


def test_constants_alone_show_nothing():
    found = bitproof.prove(lambda x: torch.zeros(3), lambda x: torch.zeros(3), X)
    assert (found.verdict, found.reason) == ("REFUSED", "no output reads an input, so that equal ones show nothing")


def test_outputs_that_are_numbers_are_compared():
    found = bitproof.prove(lambda x: (x, 3), lambda x: (x, 4), X)
    assert (found.verdict, found.reason) == (
        "REFUSED",
        "output 1 is 3 in the reference and 4 in the candidate, in the outputs",
    )


def test_what_cannot_be_traced_is_refused_with_the_line():
    found = bitproof.prove(lambda x: x if x.sum() > 0 else -x, lambda x: x, X)
    assert found.verdict == "REFUSED"
    assert "it cannot be traced" in found.reason and "test_pairs.py" in found.reason


def test_what_is_not_understood_is_refused_with_the_node():
    drop = lambda x: torch.native_dropout(x, 1.0, True)[0]  # noqa: E731
    found = bitproof.prove(drop, drop, X)
    assert found.verdict == "REFUSED" and "native_dropout" in found.reason
    drawn = lambda x: torch.nn.functional.dropout(x, 0.5)  # noqa: E731
    assert bitproof.prove(drawn, drawn, X).verdict == "PROVED"


def test_a_cast_as_decompositions_write_it_is_one_and_another_that_rounds_is_not():
    convert = torch.ops.prims.convert_element_type.default
    twice = lambda dtype: lambda x: convert(convert(x.bfloat16(), dtype), torch.bfloat16)  # noqa: E731
    found = bitproof.prove(twice(torch.float32), lambda x: x.bfloat16(), X)
    assert (found.verdict, found.evaluated) == ("PROVED", 1)
    assert bitproof.prove(twice(torch.float16), lambda x: x.bfloat16(), X * 1e-6).differs


def added_first(x, y):
    x.add_(1.0)
    return y * 2.0


def added_last(x, y):
    found = y * 2.0
    x.add_(1.0)
    return found


def test_inputs_that_share_memory_are_refused_where_it_is_written():
    """Their programs are equal of inputs that lie apart, and differ of these."""
    x = torch.randn(5, 16)
    assert bitproof.prove(added_first, added_last, x, x.clone()).verdict == "PROVED"
    for one, other in ((x, x), (x, x[1:]), (x.t(), x)):
        found = bitproof.prove(added_first, added_last, one, other)
        assert found.verdict == "REFUSED"
        assert found.reason == (
            "input 0 and input 1 share memory that a program writes: pass a copy of one, by clone()"
        )
    assert bitproof.prove(lambda x, y: x + y, lambda x, y: y + x, x, x).verdict == "PROVED", "which nobody writes"


def test_an_input_that_begins_within_a_line_of_memory_is_refused():
    """A kernel may choose its path by where its operand begins, which a copy of it changes."""
    memory, w = torch.randn(64), torch.randn(6, 6)
    multiply, copied = (lambda x, w: x @ w), (lambda x, w: x.clone() @ w)
    assert bitproof.prove(multiply, copied, memory[16:40].view(4, 6), w).verdict == "PROVED"
    found = bitproof.prove(multiply, copied, memory[1:25].view(4, 6), w)
    assert (found.verdict, str(found.reason)[:48]) == ("REFUSED", "input 0 begins at element 1 of its memory, and n")


def test_a_sum_of_itself_is_one_where_sizes_are_open():
    rows = torch.export.Dim("rows", min=2, max=64)
    twice = lambda x: x + x  # noqa: E731
    assert bitproof.prove(twice, twice, randn(4, 6), dynamic_shapes=({0: rows},)).verdict == "PROVED"
    assert bitproof.prove(twice, lambda x: 2 * x, randn(4, 6), dynamic_shapes=({0: rows},)).verdict == "NOT PROVED"


def test_what_is_drawn_alike_is_no_witness():
    """Ones and zeros are their own positive part, which no rule says."""
    step = lambda x: torch.empty_like(x).bernoulli_(0.5) * x  # noqa: E731
    before = torch.get_rng_state()
    found = bitproof.prove(step, lambda x: torch.empty_like(x).bernoulli_(0.5).relu() * x, X)
    assert (found.verdict, [answer.witness for answer in found.answers]) == ("NOT PROVED", [None])
    other = bitproof.prove(step, lambda x: torch.empty_like(x).bernoulli_(0.25) * x, X)
    assert other.answers[0].witness
    assert torch.equal(torch.get_rng_state(), before)


def test_rows_that_an_operator_leaves_unwritten_are_no_witness():
    x, w = randn(64, 32).bfloat16(), randn(4, 32, 16).bfloat16()
    no_rows = torch.zeros(4, dtype=torch.int32)

    def plain(x, w, offsets):
        return torch._grouped_mm(x, w, offs=offsets)

    def otherwise(x, w, offsets):
        return torch._grouped_mm(x.relu() - (-x).relu(), w, offs=offsets)

    found = bitproof.prove(plain, otherwise, x, w, no_rows)
    assert found.verdict == "NOT PROVED" and not found.differs
    assert (
        bitproof.prove(plain, otherwise, x, w, torch.tensor([16, 32, 48, 64], dtype=torch.int32)).verdict
        == "NOT PROVED"
    )


def test_computing_leaves_what_others_have_set_as_it_was(monkeypatch):
    inductor = pytest.importorskip("torch._inductor.config")
    monkeypatch.setattr(inductor, "deterministic", True)
    monkeypatch.setattr(deterministic, "fill_uninitialized_memory", False)
    for mode in (0, 2):
        torch.set_deterministic_debug_mode(mode)
        try:
            assert bitproof.prove(torch.exp, torch.exp, randn(4, 6)).evaluated == 1
            assert torch.get_deterministic_debug_mode() == mode
            assert inductor.deterministic and not deterministic.fill_uninitialized_memory
        finally:
            torch.set_deterministic_debug_mode(0)


def next_token_gradients(head, table, tokens):
    hidden = torch.nn.functional.embedding(tokens[:, :-1], table)
    loss = torch.nn.functional.cross_entropy((hidden @ head).flatten(0, 1), tokens[:, 1:].flatten())
    return torch.autograd.grad(loss, (head, table))


def test_the_gradients_of_a_language_model_of_sliced_tokens_are_proved():
    """It was REFUSED: the tokens are columns of a wider tensor, and the gradients of their embeddings lie in rows."""
    given = randn(8, 16).requires_grad_(), randn(16, 8).requires_grad_(), torch.randint(0, 16, (2, 7))
    found = bitproof.prove(next_token_gradients, next_token_gradients, *given)
    assert (found.verdict, found.evaluated) == ("PROVED", 2), found
    others = lambda head, table, tokens: next_token_gradients(head, table, tokens.flip(1))  # noqa: E731
    assert bitproof.prove(next_token_gradients, others, *given).differs


def test_drawn_inputs_on_which_both_programs_fail_are_left_out_and_given_ones_are_not():
    """A loss of numbers between 0 and 1 was REFUSED, since it fails on numbers that are drawn."""
    loss = torch.nn.functional.binary_cross_entropy
    x, y = torch.rand(4, 6), torch.rand(4, 6)
    found = bitproof.prove(loss, lambda x, y: loss(x * 1, y), x, y)
    assert (found.verdict, found.evaluated) == ("PROVED", 1), found
    assert "fails on real ones" in bitproof.prove(loss, loss, x + 1, y).reason
    one_fails = bitproof.prove(loss, lambda x, y: loss(x.clamp(0, 1), y.clamp(0, 1)), x, y)
    assert one_fails.verdict == "REFUSED" and "fails on real ones" in one_fails.reason
