"""Where a call belongs that runs while a parameter's gradient arrives, and to which part of an update."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import CodeType

import pytest
import torch
from torch import Tensor, nn
from torch.fx.traceback import annotate
from torch.utils.checkpoint import checkpoint

import bitproof
from bitproof.harness.graph.origin import running_part
from bitproof.harness.localize.logs.call_log import logged
from bitproof.harness.localize.logs.calls import Call


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 3, bias=False), nn.Linear(3, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(self.first(x))
        return y


class System:
    """Two micro-batches, whose gradients add up; `hook` is called with the first parameter's."""

    def __init__(self, hook: Callable[[Tensor], Tensor]) -> None:
        self.model = Model()
        self.model.first.weight.register_hook(hook)

    def gradients(self) -> None:
        for _ in range(2):
            self.model(torch.ones(5, 4)).sum().backward()


def calls_of(hook: Callable[[Tensor], Tensor], operator: str) -> list[Call]:
    system = System(hook)
    with logged(system) as log:
        system.gradients()
    return [call for call in log.calls if call.operator == operator]


def test_what_a_parameters_hook_computes_of_its_gradient_belongs_to_the_parameters_module() -> None:
    found = calls_of(lambda gradient: gradient * 2, "mul.Tensor")
    assert [(*call.place[:2], call.micro_batch) for call in found] == [
        ("first", "backward", 1),
        ("first", "backward", 2),
    ]


def test_an_evaluation_before_and_between_micro_batches_is_none_of_them() -> None:
    class Evaluated(System):
        def gradients(self) -> None:
            for _ in range(2):
                with torch.no_grad():
                    self.model(torch.ones(5, 4))
                self.model(torch.ones(5, 4)).sum().backward()

    with logged(system := Evaluated(lambda gradient: gradient * 2)) as log:
        system.gradients()
    assert [call.micro_batch for call in log.calls if call.operator == "mul.Tensor"] == [1, 2]


def test_what_backward_computes_again_belongs_to_the_module_that_runs_again_and_not_to_what_asked_for_it() -> None:
    model = nn.Sequential(nn.Tanh(), nn.Sigmoid(), nn.Tanh())

    class Again:
        def __init__(self) -> None:
            self.model = model

        def gradients(self) -> None:
            checkpoint(model, torch.ones(3, requires_grad=True), use_reentrant=False).sum().backward()

    system = Again()
    with logged(system) as log:
        system.gradients()
    again = [call for call in log.calls if call.operator in ("tanh", "sigmoid")][3:]
    assert [call.place[:2] for call in again] == [("0", "backward"), ("1", "backward"), ("2", "backward")]
    backward = [call.place.module for call in log.calls if call.operator == "sigmoid_backward"]
    assert backward == ["1"]


def test_what_backward_computes_again_of_a_module_s_own_function_belongs_to_that_module() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Tanh()

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = checkpoint(lambda x: self.inner(x.sigmoid()), x, use_reentrant=False)
            return y

    class Again:
        def __init__(self) -> None:
            self.model = nn.Sequential(Outer(), Outer())

        def gradients(self) -> None:
            self.model(torch.ones(3, requires_grad=True)).sum().backward()

    system = Again()
    with logged(system) as log:
        system.gradients()
    again = [call.place[:2] for call in log.calls if call.operator == "sigmoid"][2:]
    assert again == [("1", "backward"), ("0", "backward")]


def test_what_adds_the_gradients_of_two_micro_batches_belongs_to_the_parameters_module() -> None:
    assert [call.place.module for call in calls_of(lambda gradient: gradient, "add_.Tensor")] == ["second", "first"]


def test_what_a_modules_own_hook_computes_of_its_output_belongs_to_it_and_what_follows_does_not() -> None:
    system = System(lambda gradient: gradient)
    system.model.first.register_forward_hook(lambda _, args, result: result.neg())
    with logged(system) as log:
        system.gradients()
    found = [call.place for call in log.calls if call.operator in ("neg", "sum") and call.place.direction == "forward"]
    assert [place.module for place in found] == ["first", ""] * 2


def test_what_a_modules_backward_hooks_compute_belongs_to_it() -> None:
    class Hooked(System):
        def __init__(self) -> None:
            super().__init__(lambda gradient: gradient)
            self.model.first.register_full_backward_pre_hook(lambda _, gradients: (gradients[0] * 2,))
            self.model.first.register_full_backward_hook(lambda _, given, gradients: (given[0] * 3,))

        def gradients(self) -> None:
            self.model(torch.ones(5, 4, requires_grad=True)).sum().backward()

    system = Hooked()
    with logged(system) as log:
        system.gradients()
    assert [call.place[:2] for call in log.calls if call.operator == "mul.Tensor"] == [("first", "backward")] * 2


def test_a_call_without_autograd_that_prepares_a_batch_leaves_forward_and_its_loss_forward() -> None:
    class Prepared:
        def __init__(self) -> None:
            self.model = Model()

        def step(self, x: Tensor) -> None:
            with torch.no_grad():
                x = x.sinh()
            self.model(x).cos().sum().backward()

    system = Prepared()
    with logged(system) as log:
        system.step(torch.ones(5, 4))
    places = {call.operator: call.place[:2] for call in log.calls}
    assert (places["sinh"], places["cos"], places["sin"]) == ((None, None), ("", "forward"), ("", "backward"))


def test_a_module_within_whose_forward_a_step_is_taken_has_a_backward_and_an_update_there() -> None:
    """As where DistributedDataParallel's forward runs Lightning's training_step, which optimizes by hand."""

    class Outer(Model):
        def forward(self, x: Tensor) -> Tensor:
            super().forward(x).sum().backward()
            with torch.no_grad():
                self.first.weight.grad.sin_()  # type: ignore[union-attr]
            nn.utils.clip_grad_norm_(self.parameters(), 0.1)
            return super().forward(x).cos()

    class Redirected:
        def __init__(self) -> None:
            self.model = Outer()

        def step(self, x: Tensor) -> None:
            self.model(x)

    system = Redirected()
    with logged(system) as log:
        system.step(torch.ones(5, 4))
    lines = [call.place.direction for call in log.calls]
    phases = [direction for direction, _ in itertools.groupby(lines)]
    assert phases == ["forward", "backward", "update", "forward"]
    begun = {call.operator: direction for call, direction in zip(log.calls, lines, strict=True)}
    assert (begun["ones_like"], begun["sin_"], begun["_foreach_mul_.Tensor"]) == ("backward", "update", "update")
    system.model.forward = super(Outer, system.model).forward  # type: ignore[method-assign]
    with logged(system) as log:
        system.step(torch.ones(5, 4))
    assert {call.place.direction for call in log.calls} == {"forward"}


def test_compiled_code_that_stays_whole_is_captured_as_without_a_log_and_its_calls_have_its_module() -> None:
    torch._dynamo.reset()
    system, captured = System(lambda gradient: gradient), []
    system.model.compile(backend=lambda module, _: captured.append(module) or module.forward, fullgraph=True)
    with logged(system, stays_whole=True) as log:
        system.gradients()
    places = [call.place for call in log.calls if call.operator == "mm"]
    assert len(captured) == 1
    assert [place.module for place in places if place.direction == "forward"] == [""] * 4
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported), logged(system):
        system.gradients()


@pytest.mark.filterwarnings("ignore:Using `torch.compile:UserWarning", "ignore:The .grad attribute:UserWarning")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_code_that_a_user_compiles_has_the_modules_of_its_calls_and_dynamo_sees_no_hook(backend: str) -> None:
    torch._dynamo.reset()
    system = System(lambda gradient: gradient)
    model, seen = system.model, list[str]()

    class Compiled:
        def __init__(self) -> None:
            self.model = model
            self.run = torch.compile(model, backend=backend)

        def gradients(self) -> None:
            for _ in range(2):
                self.run(torch.ones(5, 4)).sum().backward()

    def compiled(code: CodeType, _: CodeType) -> None:
        seen.append(code.co_filename)

    handle = torch._dynamo.convert_frame.register_bytecode_hook(compiled)
    try:
        own = Compiled()
        with logged(own) as log:
            own.gradients()
    finally:
        handle.remove()
    places = [call.place for call in log.calls if call.operator == "mm"]
    assert [place.module for place in places if place.direction == "forward"] == ["first", "second"] * 2
    assert seen and not any("bitproof" in name for name in seen), seen
    torch._dynamo.reset()


def test_what_a_hook_calls_of_another_shape_as_a_buckets_exchange_has_no_module() -> None:
    def hook(gradient: Tensor) -> Tensor:
        torch.zeros(99).neg()
        return gradient

    assert [call.place[:2] for call in calls_of(hook, "neg")] == [(None, "backward")] * 2


def test_what_an_optimizers_closure_computes_is_no_update_and_a_step_that_a_gradients_hook_takes_is_one() -> None:
    model = Model()
    own = torch.optim.SGD(model.parameters(), lr=0.5)
    early = torch.optim.SGD([model.second.weight], lr=0.25)
    model.second.weight.register_post_accumulate_grad_hook(lambda _: early.step())

    def compute() -> Tensor:
        loss: Tensor = model(torch.ones(5, 4)).sum()
        loss.backward()
        return loss

    with logged(bitproof.watch(lambda index: None, model=model, optimizer=own)) as log:
        own.step(compute)
        own.step(closure=compute)
    found = [call.place[:2] for call in log.calls if call.operator in ("mm", "add_.Tensor")]
    forward, second = [("first", "forward"), ("second", "forward")], [("second", "backward")] * 2
    assert found[:8] == [*forward, *second, (None, "update"), ("first", "backward"), *[(None, "update")] * 2]
    assert found[8:10] == forward, "a closure may be given by name"


def test_what_a_later_micro_batch_makes_of_nothing_is_of_forward() -> None:
    class Step:
        def __init__(self) -> None:
            self.model = Model()

        def step(self) -> None:
            for _ in range(2):
                self.model(torch.ones(5, 4).exp()).sum().backward()

    system = Step()
    with logged(system) as log:
        system.step()
    directions = {
        (call.operator, call.place.direction) for call in log.calls if call.operator.startswith(("ones", "exp"))
    }
    assert directions == {("ones", "forward"), ("exp", "forward"), ("ones_like", "backward"), ("expand", "backward")}


def test_the_parts_of_an_update_are_reported_by_what_runs() -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)

    class Step:
        def __init__(self) -> None:
            self.model = model

        def step(self) -> None:
            scaler.scale(model(torch.ones(5, 4)).sum()).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=False)
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad.neg_()
            optimizer.step()

    system = Step()
    with logged(system) as log:
        system.step()
    parts = [call.part for call in log.calls if call.place.direction == "update"]
    assert [*dict.fromkeys(parts)] == ["loss scaling", "clipping", None, "SGD"]
    assert {call.part for call in log.calls if call.place.direction != "update"} == {None}
    assert str(log.calls[-1]) == "add_.Tensor of the step itself (update, SGD)"


def test_what_follows_all_of_backward_and_steers_a_buffer_is_of_the_update() -> None:
    """As an expert bias, though autograd is on; what is only shown is not, nor what a module follows."""
    model = Model()
    model.second.register_buffer("steer", torch.zeros(2))
    model.second.register_buffer("counts", torch.ones(2))

    class Step:
        def __init__(self) -> None:
            self.model = model

        def step(self, again: bool) -> None:
            for _ in range(2):
                loss = self.model(torch.rand(5, 4).exp()).sum()
                loss.backward()
            counts, steer = self.model.second.counts, self.model.second.steer
            assert isinstance(counts, Tensor) and isinstance(steer, Tensor)
            steer.add_((counts.mean() - counts) * 0.1)
            torch.stack([loss.detach()]).tanh()
            if again:
                self.model(torch.ones(5, 4))

    system = Step()
    for again in (False, True):
        with logged(system) as log:
            system.step(again)
        places = {call.operator: (*call.place[:2], call.micro_batch) for call in log.calls}
        steered = ("", "forward", 2) if again else (None, "update", None)
        assert [places[name] for name in ("mean", "sub.Tensor", "mul.Tensor")] == [steered] * 3
        assert places["add_.Tensor"] == (None, "update", None)
        assert places["exp"][:2] == places["stack"][:2] == places["tanh"][:2] == ("", "forward")


class Experts(nn.Module):
    """Rows travel (sin), are computed with (exp) and travel back (tanh); others annotate, too."""

    def forward(self, x: Tensor) -> Tensor:
        with annotate({"tag": "mine", "EP": "compute"}):
            with annotate({"EP": "dispatch"}):
                x = x.sin()
            x = x.exp()
            with annotate({"EP": "combine"}):
                return x.tanh()


@pytest.mark.parametrize("recomputes", [False, True])
def test_the_parts_of_a_mixture_are_those_that_its_code_names_in_backward_too_and_where_it_runs_again(
    recomputes: bool,
) -> None:
    model = nn.Sequential(nn.Sigmoid(), Experts(), nn.Sigmoid())

    class Step:
        def __init__(self) -> None:
            self.model = model

        def gradients(self) -> None:
            x = torch.ones(3, requires_grad=True)
            y = checkpoint(model, x, use_reentrant=False) if recomputes else model(x)
            y.sum().backward()

    system = Step()
    with logged(system) as log:
        system.gradients()
    forward = {"sigmoid": None, "sin": "dispatch", "exp": "compute", "tanh": "combine"}
    backward = {"cos": "dispatch", "tanh_backward": "combine", "sigmoid_backward": None}
    parts = forward | backward
    found = [(call.operator, call.part) for call in log.calls if call.operator in parts]
    assert len(found) == 5 + 4 + 5 * recomputes
    assert found == [(operator, parts[operator]) for operator, _ in found]


@pytest.mark.parametrize("said", ["elsewhere", 1, None, ["dispatch"]])
def test_an_annotation_that_names_no_part_of_a_mixture_is_none(said: object) -> None:
    with annotate({"EP": said}):
        assert running_part() is None
    assert running_part() is None
