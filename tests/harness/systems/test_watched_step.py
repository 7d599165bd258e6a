"""What `watch` shows of a function that trains once, and what it refuses."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import SGD, AdamW, Optimizer

import bitproof
from bitproof.harness.errors import RecordingError, UsageError
from bitproof.harness.systems.bare_names import bare_tensors
from bitproof.harness.systems.user_system import UserSystem


def shown(watched, index=0):
    """What a system shows in a step, by kind and name, in order."""
    rows = {}
    system = UserSystem("mine", watched, names={}, origin={})
    system.step(index, lambda kind, name, tensor: rows.__setitem__((kind, name), tensor.detach().clone()))
    return rows


def trainer(model, optimizer, *, answer=lambda loss: loss, before=lambda: None, closure=False):
    """A training step as users write it, which leaves no gradients behind."""

    def compute():
        loss = model(torch.ones(4, 3)).square().mean()
        loss.backward()
        return loss

    def step(index):
        if closure:
            loss = optimizer.step(compute)
        else:
            loss = compute()
            before()
            optimizer.step()
        optimizer.zero_grad()
        return answer(loss)

    return step


def test_a_step_shows_gradients_before_the_update_and_all_that_it_leaves():
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    optimizer = AdamW(model.parameters())
    old = model[0].weight.detach().clone()
    rows = shown(bitproof.watch(trainer(model, optimizer), model=model, optimizer=optimizer))
    names = [name for name, _ in model.named_parameters()]
    buffers = [name for name, _ in model.named_buffers()]
    assert list(rows) == [
        *(("buffer", f"{name}@before_optimizer") for name in buffers),
        *(("grad", name) for name in names),
        *(("buffer", f"{name}@after_optimizer") for name in buffers),
        *(("param", name) for name in names),
        *(("optimizer", f"{name}.{state}") for name in names for state in ("step", "exp_avg", "exp_avg_sq")),
        ("loss", "loss"),
    ]
    assert not rows["param", "0.weight"].equal(old) and rows["param", "0.weight"].equal(model[0].weight)
    assert all(rows["grad", name].numel() for name in names)


@pytest.mark.parametrize("closure", [False, True])
def test_a_gradient_is_shown_as_the_optimizer_reads_it(closure):
    model = nn.Linear(3, 2)
    optimizer = SGD(model.parameters(), lr=0.5)
    step = trainer(model, optimizer, before=lambda: nn.utils.clip_grad_norm_(model.parameters(), 1e-3), closure=closure)
    old = model.weight.detach().clone()
    rows = shown(bitproof.watch(step, model=model, optimizer=optimizer))
    assert (old - 0.5 * rows["grad", "weight"]).equal(rows["param", "weight"])
    assert (rows["grad", "weight"].norm() < 2e-3) is not closure
    assert rows["optimizer", "weight.lr"] == 0.5, "what keeps no state shows its learning rate"


def test_of_gradients_that_a_closure_computes_several_times_the_first_are_shown_in_every_step():
    model = nn.Linear(3, 2)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    kept = []
    model.weight.register_post_accumulate_grad_hook(lambda weight: kept.append(weight.grad.clone()))

    def compute():
        optimizer.zero_grad()
        loss = model(torch.ones(4, 3)).square().mean()
        loss.backward()
        return loss

    watched = bitproof.watch(lambda index: optimizer.step(compute), model=model, optimizer=optimizer)
    for index in range(2):
        kept.clear()
        rows = shown(watched, index)
        assert len(kept) > 1 and rows["grad", "weight"].equal(kept[0]) and not kept[0].equal(kept[-1])
        [steps] = [tensor for (_, name), tensor in rows.items() if name == "weight.old_stps"]
        assert len(steps) == 8 * len(optimizer.state[model.weight]["old_stps"]), "what grows has one name"
    optimizer.state.clear()
    optimizer.param_groups[0]["tolerance_grad"] = 1e9
    assert shown(watched, 0).keys() == rows.keys() and len(optimizer.state[model.weight]) == 2, "it ended at once"


def test_a_sparse_gradient_is_shown_by_its_indices_and_values():
    model = nn.Embedding(5, 2, sparse=True)
    optimizer = torch.optim.SparseAdam(list(model.parameters()))

    def step(index):
        model(torch.tensor([3, 1, 3])).sum().backward()
        optimizer.step()

    rows = shown(bitproof.watch(step, model=model, optimizer=optimizer))
    assert rows["grad", "weight.indices"].tolist() == [[3, 1, 3]] and rows["grad", "weight.values"].shape == (3, 2)
    assert ("grad", "weight") not in rows


def test_two_models_with_a_name_in_common_are_distinguished_by_their_place_in_the_list():
    models = [nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)) for _ in range(2)]
    optimizers = [SGD(model.parameters(), lr=0.5) for model in models]

    def step(index):
        sum(model(torch.ones(4, 3)).square().mean() for model in models).backward()
        for optimizer in optimizers:
            optimizer.step()

    watched = bitproof.watch(step, model=models, optimizer=optimizers)
    rows = shown(watched)
    for kind in ("param", "grad"):
        names = [f"{place}.{name}" for place in (0, 1) for name, _ in models[0].named_parameters()]
        assert [name for of, name in rows if of == kind] == names
    assert (
        rows["param", "1.0.weight"].equal(models[1][0].weight)
        and ("buffer", "1.1.running_mean@after_optimizer") in rows
    )
    assert dict(watched.named_modules())["1.0"] is models[1][0], "blame tells modules by the same names"


def test_hooks_of_the_trainer_run_before_the_gradient_is_shown():
    model = nn.Linear(3, 2)
    optimizer = SGD(model.parameters(), lr=0.5)
    watched = bitproof.watch(trainer(model, optimizer), model=model, optimizer=optimizer)
    optimizer.register_step_pre_hook(lambda *_: [model.weight.grad.zero_(), None][1])
    assert not shown(watched)["grad", "weight"].any()
    assert len(optimizer._optimizer_step_pre_hooks) == 1, "watch leaves no hook behind"


def test_what_has_no_gradient_or_no_state_shows_that_at_every_step():
    model = nn.ModuleDict({"used": nn.Linear(3, 2), "idle": nn.Linear(3, 2, bias=False)})
    frozen = nn.Linear(3, 2, bias=False).requires_grad_(False)
    optimizer = AdamW(model.parameters())
    step = trainer(model["used"], optimizer)
    rows = shown(bitproof.watch(step, model=[model, nn.ModuleDict({"frozen": frozen})], optimizer=optimizer))
    assert rows["grad", "idle.weight"].shape == rows["optimizer", "idle.weight.exp_avg"].shape == (0,)
    assert rows["param", "frozen.weight"].equal(frozen.weight) and ("grad", "frozen.weight") not in rows


def test_names_are_those_of_the_bare_model_whatever_wraps_it_and_its_optimizer():
    class Holder(Optimizer):  # as Accelerate's, which has no state of its own
        def __init__(self, optimizer):
            self.optimizer = optimizer

    bare = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    bare[1] = torch.compile(bare[1], backend="eager")
    model = torch.compile(nn.DataParallel(bare), backend="eager")
    optimizer = AdamW(model.parameters())
    watched = bitproof.watch(trainer(bare[0], optimizer), model=model, optimizer=[Holder(optimizer)])
    names = [name for kind, name in shown(watched) if kind == "param"]
    assert names == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert watched.model is bare, "blame tells modules by the same names"


def test_a_parameter_of_the_optimizer_alone_is_shown_by_its_place_there():
    model, scale = nn.Linear(3, 2), nn.Parameter(torch.ones(1))
    optimizer = SGD([{"params": model.parameters()}, {"params": [scale], "lr": 0.25}], lr=0.5)
    rows = shown(bitproof.watch(trainer(model, optimizer), model=model, optimizer=optimizer))
    assert rows["optimizer", "optimizer.0.group1.param0.lr"] == 0.25
    assert ("grad", "optimizer.0.group1.param0") in rows
    assert rows["param", "optimizer.0.group1.param0"].equal(scale)


def scaled(model, *optimizers):
    """A step in which these optimizers update what they have, each parameter by a gradient of ones."""

    def step(index):
        model(torch.ones(4, 3)).square().mean().backward()
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = torch.ones_like(parameter)
            optimizer.step()

    return step


def test_values_of_all_parameters_that_optimizers_hold_alone_are_shown_each_once():
    model, first, second, shared = nn.Linear(3, 2), *(nn.Parameter(torch.full((1,), float(n))) for n in range(3))
    optimizers = [AdamW([*model.parameters(), first, shared]), SGD([second, shared], lr=0.5)]
    rows = shown(bitproof.watch(scaled(model, *optimizers), model=model, optimizer=optimizers))
    named = {name: value for (kind, name), value in rows.items() if kind == "param"}
    assert [*named] == ["weight", "bias", *(f"optimizer.{name}" for name in ALONE)]
    assert [named[f"optimizer.{name}"].item() for name in ALONE] == [first.item(), shared.item(), second.item()]
    grads = [name for kind, name in rows if kind == "grad" and name.startswith("optimizer")]
    assert grads == [f"optimizer.{name}" for name in (*ALONE, "1.group0.param1")], "each optimizer reads its own"


ALONE = ("0.group0.param2", "0.group0.param3", "1.group0.param0")


def test_what_an_optimizer_updates_that_watch_was_not_given_is_shown_too():
    model, scale = nn.Linear(3, 2), nn.Parameter(torch.ones(1))
    watched, other = SGD(model.parameters(), lr=0.5), SGD([scale], lr=0.5)
    system = bitproof.watch(scaled(model, watched, other), model=model, optimizer=watched)
    for index in range(2):
        assert shown(system, index)["param", "optimizer.1.group0.param0"].equal(scale) and scale < 1
    assert not other._optimizer_step_pre_hooks


def test_optimizers_that_are_made_anew_in_each_step_have_the_same_names_in_each():
    model = nn.Linear(3, 2)
    optimizer = SGD(model.parameters(), lr=0.5)

    def step(index):
        scaled(model, SGD([nn.Parameter(torch.ones(1))], lr=0.5), optimizer)(index)

    system = bitproof.watch(step, model=model, optimizer=optimizer)
    names = [[name for _, name in shown(system, index)] for index in range(2)]
    assert names[0] == names[1] and "optimizer.1.group0.param0" in names[0]


def test_a_parameter_that_joins_an_optimizer_later_is_shown_from_then_on():
    model, late = nn.Linear(3, 2), nn.Parameter(torch.ones(1))
    optimizer = SGD(model.parameters(), lr=0.5)
    system = bitproof.watch(scaled(model, optimizer), model=model, optimizer=optimizer)
    name = ("param", "optimizer.0.group1.param0")
    assert name not in shown(system)
    optimizer.add_param_group({"params": [late]})
    assert shown(system, 1)[name].equal(late)


def test_a_state_that_an_optimizer_keeps_under_a_name_is_shown():
    model = nn.Linear(3, 2)
    optimizer = SGD(model.parameters(), lr=0.5)
    optimizer.state["curvature"] = {"mean": torch.tensor(3.0)}
    rows = shown(bitproof.watch(trainer(model, optimizer), model=model, optimizer=optimizer))
    assert rows["optimizer", "optimizer.0.curvature.mean"] == 3


class Beside(nn.Module):
    """Has a weight beside a child whose name torch's wrappers use, which has one, too."""

    def __init__(self, child):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.add_module(child, nn.Linear(3, 2, bias=False))
        self.child = child

    def forward(self, x):
        return self.get_submodule(self.child)(x * self.weight)


@pytest.mark.parametrize("child", ["_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"])
@pytest.mark.parametrize(
    ("wrap", "prefix"),
    [
        (lambda model: model, ""),
        (lambda model: torch.compile(model, backend="eager"), ""),
        (lambda model: nn.DataParallel(torch.compile(model, backend="eager")), ""),
        (lambda model: nn.Sequential(model), "0."),
        (lambda model: nn.Sequential(torch.compile(model, backend="eager")), "0."),
        (lambda model: nn.Sequential(checkpoint_wrapper(model)), "0."),
        (lambda model: nn.Sequential(checkpoint_wrapper(torch.compile(model, backend="eager"))), "0."),
    ],
)
def test_a_child_that_is_named_like_a_wrapped_one_hides_nothing_beside_it(child, wrap, prefix):
    bare = Beside(child)
    model = wrap(bare)
    optimizer = SGD(model.parameters(), lr=0.5)
    rows = shown(bitproof.watch(scaled(bare, optimizer), model=model, optimizer=optimizer))
    assert [name for kind, name in rows if kind == "param"] == [f"{prefix}weight", f"{prefix}{child}.weight"]
    assert rows["param", f"{prefix}weight"].equal(bare.weight)


def test_buffers_and_children_beside_a_wrapped_name_are_kept_apart_as_well():
    model = nn.Module()
    model._orig_mod = nn.BatchNorm1d(2)
    model.register_buffer("running_mean", torch.ones(3))
    model.weight = nn.Linear(2, 2, bias=False)  # a child of the name of a parameter
    names = [name for kind in ("parameters", "buffers") for name, _ in bare_tensors(model, kind)]
    assert names == [
        "_orig_mod.weight",
        "_orig_mod.bias",
        "weight.weight",
        "running_mean",
        "_orig_mod.running_mean",
        "_orig_mod.running_var",
        "_orig_mod.num_batches_tracked",
    ]


def test_bare_names_are_torchs_own_where_nothing_is_wrapped():
    shared = nn.Linear(2, 2)
    model = nn.Sequential(shared, nn.Sequential(shared, nn.BatchNorm1d(2)), nn.TransformerEncoderLayer(4, 2, 8))
    model[2].linear1.weight = model[2].linear2.weight
    for kind in ("parameters", "buffers"):
        assert [*bare_tensors(model, kind)] == [*getattr(model, f"named_{kind}")()]


def test_two_models_that_grow_into_one_name_are_refused():
    models = [nn.ModuleDict({"a": nn.Linear(3, 2)}), nn.ModuleDict({"b": nn.Linear(3, 2)})]
    optimizer = SGD([p for model in models for p in model.parameters()], lr=0.5)
    system = bitproof.watch(scaled(models[0]["a"], optimizer), model=models, optimizer=optimizer)
    for model in models:
        model.register_parameter("late", nn.Parameter(torch.ones(1)))
    with pytest.raises(RecordingError, match="two parameters of the watched models are named 'late'"):
        shown(system)


def test_a_parameter_that_the_optimizer_was_not_given_is_shown_without_any_state():
    model = nn.Linear(3, 2)
    for optimizer in (AdamW([model.weight]), SGD([model.weight], lr=0.5)):
        rows = shown(bitproof.watch(trainer(model, optimizer), model=model, optimizer=optimizer))
        states = [name for kind, name in rows if kind == "optimizer" and name.startswith("bias.")]
        assert states and not any(rows["optimizer", name].numel() for name in states)
        assert rows["grad", "bias"].shape == (2,)


@pytest.mark.parametrize(
    ("answer", "expected"), [(lambda loss: None, None), (lambda loss: 1.5, 1.5), (lambda loss: loss * 0 + 2, 2.0)]
)
def test_a_loss_is_a_tensor_a_number_or_none_where_a_rank_has_none(answer, expected):
    model = nn.Linear(3, 2)
    optimizer = SGD(model.parameters(), lr=0.5)
    rows = shown(bitproof.watch(trainer(model, optimizer, answer=answer), model=model, optimizer=optimizer))
    assert rows.get(("loss", "loss")) == expected
    with pytest.raises(RecordingError, match=r"step\(3\) returned no loss"):
        wrong = trainer(model, optimizer, answer=lambda loss: "low")
        shown(bitproof.watch(wrong, model=model, optimizer=optimizer), 3)


def test_a_step_without_an_update_and_one_with_two_are_refused():
    model = nn.Linear(3, 2)
    optimizer, other = SGD(model.parameters(), lr=0.5), SGD(model.parameters(), lr=0.5)
    with pytest.raises(RecordingError, match=r"step\(0\) ended, and no watched optimizer had taken a step"):
        shown(bitproof.watch(trainer(model, other), model=model, optimizer=optimizer))
    once = trainer(model, optimizer)
    with pytest.raises(RecordingError, match="showed grad 'weight' twice in step 0"):
        shown(bitproof.watch(lambda index: [once(index), once(index)][0], model=model, optimizer=optimizer))
    assert not optimizer._optimizer_step_pre_hooks


def test_what_is_no_model_or_no_optimizer_is_refused():
    model = nn.Linear(3, 2)
    with pytest.raises(UsageError, match="model that is none"):
        bitproof.watch(print, model=print, optimizer=SGD(model.parameters()))
    with pytest.raises(UsageError, match="optimizer that is none"):
        bitproof.watch(print, model=model, optimizer=model)


class Attributes(SGD):
    """Keeps its memory in attributes, of every form, and changes all of it in each step."""

    def __init__(self, parameters, **settings):
        super().__init__(parameters, **settings)
        held = [p for group in self.param_groups for p in group["params"]]
        self.rate, self.calls, self.flag, self.still = 0.5, 0, False, 3.0
        self.array = numpy.zeros(2)
        self.momentum = [torch.zeros_like(p) for p in held]
        self.by_parameter = {p: torch.zeros(1) for p in held}
        self.by_address = {id(p): torch.zeros(1) for p in held}
        self.helper = SimpleNamespace(average=torch.zeros(1), back=self)
        self.copies = nn.Linear(1, 1, bias=False)
        self.same = {"parameters": held, "views": [p.detach().view(-1) for p in held]}

    def step(self, closure=None):
        super().step(closure)
        self.rate *= 0.5
        self.calls += 1
        self.flag = True
        self.array += 1
        for tensor in (
            *self.momentum,
            *self.by_parameter.values(),
            *self.by_address.values(),
            self.helper.average,
            self.copies.weight.data,
        ):
            tensor.add_(1)


def test_what_a_step_changes_of_an_optimizers_attributes_is_shown():
    model = nn.Linear(3, 2)
    optimizer = Attributes(model.parameters(), lr=0.5)
    rows = shown(bitproof.watch(trainer(model, optimizer), model=model, optimizer=optimizer))
    changed = [name.removesuffix("@changed") for kind, name in rows if name.endswith("@changed")]
    assert changed == [
        f"optimizer.0.{path}"
        for path in (
            "rate",
            "calls",
            "array",
            *(f"{each}.{key}" for each, keys in KEYS.items() for key in keys),
            "helper.average",
            "copies.weight",
        )
    ]
    assert rows["optimizer", "optimizer.0.rate@changed"] == 0.25
    assert rows["optimizer", "optimizer.0.momentum.1@changed"].equal(torch.ones(2))


KEYS = {"momentum": (0, 1), "by_parameter": ("param0", "param1"), "by_address": ("param0", "param1")}


def test_a_learning_rate_that_a_scheduler_writes_is_shown_at_the_steps_that_change_it():
    model = nn.Linear(3, 2)
    optimizer = AdamW(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    inner = trainer(model, optimizer)

    def step(index):
        loss = inner(index)
        scheduler.step()
        return loss

    system = bitproof.watch(step, model=model, optimizer=optimizer)
    rows = [shown(system, index) for index in range(2)]
    assert ("optimizer", "weight.lr@changed") not in rows[0]
    assert rows[1]["optimizer", "weight.lr@changed"] == rows[1]["optimizer", "bias.lr@changed"] == 0.05


@pytest.mark.parametrize("made", [lambda p: AdamW(p), lambda p: SGD(p, lr=0.5, weight_decay=0.1, momentum=0.9)])
def test_what_no_step_changes_of_settings_and_attributes_is_not_shown(made):
    model = nn.Linear(3, 2)
    optimizer = made(model.parameters())
    optimizer.scratch = torch.ones(3)
    rows = shown(bitproof.watch(trainer(model, optimizer), model=model, optimizer=optimizer))
    assert not [name for _, name in rows if name.endswith("@changed")]


def test_the_state_of_an_optimizer_that_watch_was_not_given_is_shown():
    model, scale = nn.Linear(3, 2), nn.Parameter(torch.ones(1))
    watched, other = AdamW(model.parameters()), AdamW([scale, model.bias])
    rows = shown(bitproof.watch(scaled(model, watched, other), model=model, optimizer=watched))
    assert ("optimizer", "optimizer.1.group0.param0.exp_avg_sq") in rows
    assert ("optimizer", "bias.exp_avg") in rows and ("optimizer", "optimizer.1.group0.param1.exp_avg") in rows


class Lookahead:
    """Holds an optimizer and is none: it pulls parameters towards slow copies of them."""

    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.slow = {p: p.detach().clone() for group in optimizer.param_groups for p in group["params"]}

    def step(self):
        self.optimizer.step()
        for parameter, slow in self.slow.items():
            slow.lerp_(parameter.detach(), 0.5)

    def zero_grad(self):
        self.optimizer.zero_grad()


def test_what_an_object_keeps_that_holds_an_optimizer_is_shown():
    model = nn.Linear(3, 2)
    optimizer = Lookahead(AdamW(model.parameters()))
    rows = shown(bitproof.watch(trainer(model, optimizer), model=model, optimizer=optimizer))
    assert [name for _, name in rows if name.endswith("@changed")] == [
        "optimizer.holder0.slow.param0@changed",
        "optimizer.holder0.slow.param1@changed",
    ]


@pytest.fixture
def two_meshes():
    """DTensors with the same shard on two meshes of two ranks: torch cannot join them."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        meshes = init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (1, 2))
        yield [DTensor.from_local(torch.ones(3), mesh, [Replicate()] * mesh.ndim, run_check=False) for mesh in meshes]
    finally:
        dist.destroy_process_group()


def test_tensors_of_several_meshes_that_an_optimizer_keeps_in_a_list_are_recorded_shard_by_shard(two_meshes):
    model = nn.Linear(3, 2)
    optimizer = Attributes(model.parameters(), lr=0.5)
    optimizer.kept = two_meshes
    optimizer.state[model.bias]["history"] = two_meshes
    rows = shown(bitproof.watch(trainer(model, optimizer), model=model, optimizer=optimizer))
    assert rows["optimizer", "bias.history"].equal(torch.ones(6))
    assert not [name for _, name in rows if name.startswith("optimizer.0.kept")], "no step changes them"


def test_a_step_of_a_class_that_calls_that_of_its_base_counts_once():
    model = nn.Linear(3, 2)
    SGD(model.parameters())  # now torch runs hooks in the step of the base, too
    optimizer = Attributes(model.parameters(), lr=0.5)
    loops = []

    def loop():
        while True:
            trainer(model, optimizer)(0)

    watched = bitproof.watch(train=loop, model=model)

    @contextmanager
    def taking(index):
        loops.append({})
        yield lambda kind, name, tensor: loops[-1].__setitem__((kind, name), tensor.detach().clone())

    watched.take_steps(2, taking)
    assert [rows["optimizer", "optimizer.0.calls@changed"].item() for rows in loops] == [1, 2]
