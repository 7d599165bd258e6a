"""Steps with an optimizer among their inputs: which are proved, and of which any number of steps is."""

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW

import bitproof
from bitproof.harness.powers.proofs.prover.evaluate import same_bits
from bitproof.harness.powers.proofs.prover.programs.reachable import Reached, changed
from tests.harness.powers.proofs.toy_graphs import aten, randn
from tests.sweeps import sweep

X = randn(4, 6)


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))


def step(optimizer, *, clip=None, zero=True, after=None, **settings):
    """A step of training, which has its own settings of the optimizer while it runs."""

    def train(net, held, x):
        before = [dict(group) for group in held.param_groups]
        for group in held.param_groups:
            group.update(settings)
        net(x).square().mean().backward()
        if clip is not None:
            nn.utils.clip_grad_norm_([*net.parameters()][::clip], 1.0, foreach=False)
        held.step()
        for group, own in zip(held.param_groups, before, strict=True):
            group.update(own)
        if zero:
            held.zero_grad()
        if after is not None:
            after(held)

    return train


def prove(kind, one, other, *, warm=True, **given):
    """Two steps of one optimizer, which has taken one before where it is `warm`."""
    net = model()
    held = kind(net.parameters(), **given)
    if warm:
        step(held)(net, held, X)
    return bitproof.prove(one(held), other(held), net, held, X)


def of(**options):
    return lambda held: step(held, **options)


EQUAL = [
    (SGD, of(), of(foreach=True), {}),
    (SGD, of(foreach=True), of(foreach=False), {"momentum": 0.9}),
    (AdamW, of(), of(), {}),
    (AdamW, of(clip=1), of(clip=1), {"foreach": True}),
    (AdamW, of(clip=1), of(clip=1), {"fused": True}),
    (Adam, of(), of(), {"fused": True, "amsgrad": True}),
]


@pytest.mark.parametrize(("kind", "one", "other", "given"), sweep(EQUAL, EQUAL[1], EQUAL[4]))
def test_any_number_of_equal_steps_is_proved(kind, one, other, given):
    found = prove(kind, one, other, **given)
    assert (found.verdict, found.induction.reason) == ("PROVED", None), (found.reason, found.answers)
    assert found.induction.holds and found.evaluated == len(found.answers)
    names = [f"optimizer {name}.{key}" for name, _ in model().named_parameters() for key in keys_of(kind, given)]
    assert {*names, "parameter 0.weight"} <= {*found.induction.state}


def keys_of(kind, given):
    if kind is SGD:
        return ["momentum_buffer"] if given else []
    return ["step", "exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if "amsgrad" in given else [])]


OTHERS = [
    (AdamW, of(), of(betas=(0.8, 0.999)), {"fused": True}),
    (AdamW, of(), of(eps=1e-7), {}),
    (AdamW, of(), of(weight_decay=0.1), {"foreach": True}),
    (AdamW, of(clip=1), of(clip=-1), {"fused": True}),  # another order of the norm's sum
    (AdamW, of(clip=1), of(clip=2), {"fused": True}),
    (SGD, of(), of(maximize=True), {}),
]


@pytest.mark.parametrize(("kind", "one", "other", "given"), sweep(OTHERS, OTHERS[1], OTHERS[4], OTHERS[5]))
def test_another_optimizer_is_not_proved(kind, one, other, given):
    found = prove(kind, one, other, **given)
    assert found.verdict == "NOT PROVED", found.reason
    assert (found.induction.holds, found.induction.reason) == (False, "one step is not proved")


def test_numbers_of_a_step_count_are_computed_from_it_and_not_those_of_the_traced_step():
    """A trace in which the count is known holds another step's numbers. Where Python keeps it, any trace does."""
    steps = [of()] * 2
    found = prove(AdamW, *steps)
    calls = {call.op for call in found.graphs[0].calls}
    assert found.induction.holds and {"python.float", "python.pow"} <= calls

    class Counted(SGD):
        def step(self):
            for state in self.state.values():
                state["steps"] = state.get("steps", 0) + 1
            return super().step()

    found = prove(Counted, *steps, momentum=0.9)
    assert (found.verdict, found.induction.holds) == ("PROVED", False)
    assert found.induction.reason == "the step changes what is no tensor: " + ", ".join(
        f"optimizer {name}.steps" for name in ("0.weight", "0.bias", "1.weight")
    )


def decays(held):
    held.param_groups[0]["lr"] *= 0.5


@pytest.mark.parametrize(
    ("steps", "options", "reason"),
    [
        (of(after=decays), {}, "the step changes what is no tensor: optimizer 0 group 0 lr"),
        (
            of(zero=False),
            {},
            "the step leaves a gradient of 0.weight, to which the next may add: end it by zero_grad()",
        ),
        (
            of(),
            {"warm": False, "momentum": 0.5},
            "the optimizer makes state in this step, or lays it out again: optimizer 0.weight.momentum_buffer; "
            "take a step before",
        ),
    ],
)
def test_a_step_after_which_the_next_is_another_says_so(steps, options, reason):
    found = prove(SGD, steps, steps, **options)
    assert (found.verdict, found.induction.holds, found.induction.reason) == ("PROVED", False, reason)


class Replaces(SGD):
    """It puts new state in the old one's place."""

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(self.state[p]["momentum_buffer"])
                self.state[p]["momentum_buffer"] = self.state[p]["momentum_buffer"] * group["nesterov"] + p.grad


def test_state_that_is_put_in_anothers_place_is_an_output():
    net = model()
    held = Replaces(net.parameters())
    held.state.update({p: {"momentum_buffer": torch.ones_like(p)} for p in net.parameters()})
    equal = bitproof.prove(step(held, nesterov=2), step(held, nesterov=2), net, held, X)
    assert equal.induction.holds
    found = bitproof.prove(step(held, nesterov=2), step(held, nesterov=3), net, held, X)
    unproved = [answer.output for answer in found.answers if answer.verdict != "PROVED"]
    assert unproved == [f"written optimizer {name}.momentum_buffer" for name, _ in net.named_parameters()]


def test_draws_leave_the_generator_in_one_state_on_both_sides():
    drop = nn.functional.dropout
    one = bitproof.prove(lambda x: drop(x, 0.5), lambda x: drop(x, 0.5), X)
    assert one.induction.holds and one.induction.state == ("the random generator's state",)
    other = bitproof.prove(lambda x: drop(x, 0.5), lambda x: (drop(x, 0.5), torch.rand_like(x))[0], X)
    assert other.verdict == "REFUSED"
    assert other.reason == "the two leave the random generator in other states: what is drawn next differs"


class Keeps(nn.Linear):
    """It keeps something where nobody looks for state."""

    def __init__(self, keeps):
        super().__init__(6, 5)
        self.keeps, self.kept = keeps, [0]

    def forward(self, x):
        match self.keeps:
            case "count":
                self.count = getattr(self, "count", 0) + 1
            case "item":
                self.kept[0] += 1
            case "tensor":
                self.last = x * 1.0
            case "parameter":
                self.weight = nn.Parameter(self.weight * 2)
        return super().forward(x)


@pytest.mark.parametrize("keeps", ["nothing", "count", "item", "tensor", "parameter"])
def test_what_a_module_keeps_elsewhere_is_found(keeps):
    net = Keeps(keeps)
    found = bitproof.prove(net, net, X)
    if keeps == "parameter":
        assert found.verdict == "REFUSED" and "another tensor in the place of parameter weight" in found.reason
        return
    assert (found.verdict, found.induction.holds) == ("PROVED", keeps == "nothing")
    named = {"count": "module count", "item": "module kept[0]", "tensor": "module last"}
    text = f"the step changes what is no tensor: {named[keeps]}" if keeps in named else None
    assert found.induction.reason == text


def test_a_tensor_that_lies_where_one_was_that_is_gone_is_another():
    net = nn.Linear(2, 2)
    for _ in range(8):
        net.extra = torch.ones(1)
        before = Reached({"module ": net})
        del net.extra
        net.extra = torch.zeros(2)
        assert changed(before, before) == {}
        assert [*changed(before, Reached({"module ": net}))] == ["module extra"]


def test_a_gradient_that_is_there_before_the_step_is_reported():
    net = model()
    net(X).sum().backward()
    held = SGD(net.parameters())
    found = bitproof.prove(step(held), step(held), net, held, X)
    assert found.induction.reason == "a gradient of parameter 0.weight is there before the step, which may add to it"


def test_an_optimizer_of_parameters_that_nobody_gives_is_refused():
    held = SGD(model().parameters())
    found = bitproof.prove(step(held), step(held), model(), held, X)
    assert found.reason == "an optimizer of a parameter that no module among the inputs has, in the inputs"


def test_a_buffer_in_whose_place_another_tensor_is_put_is_refused():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(6))

        def forward(self, x):
            self.seen = self.seen + x.sum(0)
            return x * 2

    found = bitproof.prove(Counts(), lambda x: x * 2, X)
    assert found.verdict == "REFUSED" and "replaces the tensor of buffer seen" in found.reason


@pytest.mark.parametrize("kernel", [aten._fused_adamw_, aten._fused_adam_])
def test_an_optimizers_kernel_goes_by_elements_in_order_wherever_they_begin(kernel):
    """The argument of `known_operators.UPDATES`; its neighbour: elements in another order get other numbers."""
    settings = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.1, "eps": 1e-8}
    settings |= {"amsgrad": False, "maximize": False}
    for size in (1, 7, 16, 33, 1000):
        given = [randn(size), randn(size) * 3, randn(size) / 7, randn(size).square()]
        updated = []
        for start in range(16):
            own = [
                torch.cat([torch.zeros((start + 5 * i) % 16), x])[(start + 5 * i) % 16 :] for i, x in enumerate(given)
            ]
            kernel.default(*([x] for x in own), [], [torch.tensor(3.0)], **settings)
            updated.append(own)
        assert all(same_bits(x, y) for others in updated for x, y in zip(others, updated[0], strict=True))
    grid = [x.reshape(25, 40) for x in given]
    columns = torch.empty_strided((25, 40), (1, 25)).copy_(grid[1])
    kernel.default([grid[0]], [columns], [grid[2]], [grid[3]], [], [torch.tensor(3.0)], **settings)
    assert not same_bits(grid[0].reshape(-1), updated[0][0])


def test_an_optimizers_kernel_is_refused_for_gradients_in_columns():
    def columns(held):
        def train(net, held, x):
            net(x).square().mean().backward()
            for p in net.parameters():
                p.grad = p.grad.t().contiguous().t() if p.dim() == 2 else p.grad
            held.step()

        return train

    found = prove(AdamW, columns, columns, fused=True)
    assert found.verdict == "REFUSED" and "aten._fused_adamw_.default" in found.reason
