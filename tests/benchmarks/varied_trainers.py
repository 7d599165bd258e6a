"""Trainers of eight kinds that the other files lack, with one defect each: `varied_trainers.py:lora__other_scale`.

A recurrent network, a contrastive loss over gathered embeddings, an averaged teacher, a low-rank adapter, an optimizer
that orthogonalizes its updates, an image transformer with dropout, a variational autoencoder, and a step that the user
compiles himself. Written in the form of `defective_trainers`.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, normalize, one_hot
from torch.nn.parallel import DistributedDataParallel

from bitproof import Case, Mesh, watch
from tests.benchmarks.defective_trainers import Defect, on_rank, void

STEPS = 1
DIM = 16


class Trainer:
    """A rank's training run. Subclasses set `model` and `optimizer`, and compute the loss; a defect is put in last."""

    model: nn.Module
    optimizer: torch.optim.Optimizer

    def __init__(self, mesh: Mesh) -> None:
        self.rank = mesh.rank
        self.data = torch.Generator().manual_seed(mesh.rank)
        self.build()

    def build(self) -> None:
        """Make the model and its optimizer."""
        raise NotImplementedError

    def loss(self) -> Tensor:
        """Draw a batch and return its loss."""
        raise NotImplementedError

    def step(self, index: int) -> Tensor:
        """Take one step and return its loss."""
        loss = self.loss()
        loss.backward()
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


class Recurrent(Trainer):
    """A GRU cell over a sequence, with momentum."""

    def build(self) -> None:
        self.model = nn.ModuleDict(
            {"embedding": nn.Embedding(32, DIM), "cell": nn.GRUCell(DIM, DIM), "output": nn.Linear(DIM, 32)}
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9, foreach=False)

    def loss(self) -> Tensor:
        tokens = torch.randint(32, (4, 6), generator=self.data)
        state, total = torch.zeros(4, DIM), torch.zeros(())
        for now, then in zip(tokens[:, :-1].unbind(1), tokens[:, 1:].unbind(1), strict=True):
            state = self.model["cell"](self.model["embedding"](now), state)  # type: ignore[index]
            total = total + cross_entropy(self.model["output"](state), then)  # type: ignore[index]
        return total


class Contrastive(Trainer):
    """Two views of a batch, each compared with the embeddings of all ranks."""

    def build(self) -> None:
        self.model = nn.Sequential(nn.Linear(DIM, 32), nn.ReLU(), nn.Linear(32, DIM))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.temperature = 0.1

    def loss(self) -> Tensor:
        x = torch.randn(4, DIM, generator=self.data)
        first, second = (normalize(self.model(x + 0.1 * torch.randn(4, DIM, generator=self.data))) for _ in range(2))
        gathered = [torch.empty_like(second) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, second.detach())
        gathered[self.rank] = second
        logits = first @ torch.cat(gathered).T / self.temperature
        return cross_entropy(logits, 4 * self.rank + torch.arange(4))


class Teacher(Trainer):
    """A student that imitates an average of its own earlier weights."""

    def build(self) -> None:
        student = nn.Sequential(nn.Linear(DIM, 32), nn.GELU(), nn.Linear(32, DIM))
        teacher = deepcopy(student).requires_grad_(False)
        self.model = nn.ModuleDict({"student": student, "teacher": teacher})
        self.optimizer = torch.optim.AdamW(student.parameters(), lr=1e-2)
        self.rate = 0.01

    def loss(self) -> Tensor:
        x = torch.randn(4, DIM, generator=self.data)
        noisy = x + 0.1 * torch.randn(4, DIM, generator=self.data)
        return (self.model["student"](noisy) - self.model["teacher"](x)).square().mean()  # type: ignore[index]

    def step(self, index: int) -> Tensor:
        loss = super().step(index)
        pairs = (self.model[name].parameters() for name in ("teacher", "student"))  # type: ignore[index]
        with torch.no_grad():
            for average, weight in zip(*pairs, strict=True):
                average.lerp_(weight, self.rate)
        return loss


class Adapted(nn.Module):
    """A frozen layer with a low-rank correction."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(DIM, DIM).requires_grad_(False)
        self.down, self.up = nn.Linear(DIM, 4, bias=False), nn.Linear(4, DIM, bias=False)
        self.scale = 2.0

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output and its correction."""
        y: Tensor = self.base(x) + self.up(self.down(x)) * self.scale
        return y


class LowRank(Trainer):
    """Two adapted layers under DDP."""

    def build(self) -> None:
        self.model = nn.Sequential(Adapted(), nn.SiLU(), Adapted())
        self.run = DistributedDataParallel(self.model)
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-3)

    def loss(self) -> Tensor:
        x = torch.randn(4, DIM, generator=self.data)
        return (self.run(x) - x.roll(1, -1)).square().mean()


class Orthogonal(torch.optim.Optimizer):
    """Momentum whose matrices are orthogonalized by Newton and Schulz's iteration, as Muon's."""

    def __init__(self, parameters: Any, **settings: Any) -> None:
        super().__init__(parameters, {"lr": 0.02, "momentum": 0.95, "factor": 1.5} | settings)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update each matrix."""
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                momentum = state.setdefault("momentum", torch.zeros_like(parameter))
                momentum.lerp_(parameter.grad, 1 - group["momentum"])
                x = momentum / (momentum.norm() + 1e-7)
                for _ in range(3):
                    x = group["factor"] * x - 0.5 * (x @ x.T @ x)
                parameter.add_(x, alpha=-group["lr"])


class Muon(Trainer):
    """Two matrices with that optimizer."""

    def build(self) -> None:
        self.model = nn.Sequential(nn.Linear(DIM, DIM, bias=False), nn.Tanh(), nn.Linear(DIM, DIM, bias=False))
        self.optimizer = Orthogonal(self.model.parameters())

    def loss(self) -> Tensor:
        x = torch.randn(4, DIM, generator=self.data)
        return (self.model(x) - x.flip(-1)).square().mean()


class Vision(Trainer):
    """One layer of a transformer over patches, with dropout."""

    def build(self) -> None:
        layer = nn.TransformerEncoderLayer(DIM, 2, 32, dropout=0.1, batch_first=True, norm_first=True)
        self.model = nn.ModuleDict({"patches": nn.Conv2d(3, DIM, 4, 4), "layer": layer, "head": nn.Linear(DIM, 5)})
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def loss(self) -> Tensor:
        images = torch.randn(2, 3, 8, 8, generator=self.data)
        model: Any = self.model
        patches = model["patches"](images).flatten(2).transpose(1, 2)
        return cross_entropy(model["head"](model["layer"](patches).mean(1)), torch.tensor([self.rank, 3]))


class Variational(Trainer):
    """A convolutional autoencoder whose code is drawn."""

    def build(self) -> None:
        encoder = nn.Sequential(nn.Conv2d(1, 4, 3, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2 * DIM))
        decoder = nn.Sequential(nn.Linear(DIM, 64), nn.Unflatten(1, (4, 4, 4)), nn.ConvTranspose2d(4, 1, 4, 2, 1))
        self.model = nn.ModuleDict({"encoder": encoder, "decoder": decoder})
        self.optimizer = torch.optim.RMSprop(self.model.parameters(), lr=1e-3, foreach=False)
        self.weight = 1.0

    def loss(self) -> Tensor:
        model: Any = self.model
        images = torch.rand(4, 1, 8, 8, generator=self.data)
        mean, log_variance = model["encoder"](images).chunk(2, 1)
        code = mean + torch.exp(0.5 * log_variance) * torch.randn(mean.shape, generator=self.data)
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum()
        return binary_cross_entropy_with_logits(model["decoder"](code), images, reduction="sum") + (
            self.weight * divergence
        )


class SelfCompiled(Trainer):
    """A model that the user compiles whole, by a backend that runs the graph as it is."""

    def build(self) -> None:
        self.model = nn.Sequential(nn.Linear(DIM, 32), nn.Softplus(), nn.LayerNorm(32), nn.Linear(32, 5))
        self.optimizer = torch.optim.Adamax(self.model.parameters(), lr=1e-3, foreach=False)
        self.smoothing = 0.1

    def loss(self) -> Tensor:
        x = torch.randn(4, DIM, generator=self.data)
        target = one_hot(torch.randint(5, (4,), generator=self.data), 5).float()
        compiled = torch.compile(self.model, backend="eager")
        return cross_entropy(compiled(x), target * (1 - self.smoothing) + self.smoothing / 5)


KINDS: dict[str, type[Trainer]] = {
    "recurrent": Recurrent,
    "contrastive": Contrastive,
    "teacher": Teacher,
    "lora": LowRank,
    "muon": Muon,
    "vision": Vision,
    "variational": Variational,
    "self_compiled": SelfCompiled,
}


def attribute(name: str, value: object) -> Callable[[Any], None]:
    """An attribute of the trainer, or of one of its modules, by its path."""

    def put_in(trainer: Any) -> None:
        path, _, last = name.rpartition(".")
        setattr(trainer.model.get_submodule(path) if path else trainer, last, value)

    return put_in


def group(**settings: Any) -> Callable[[Any], None]:
    """The optimizer's other settings."""
    return lambda trainer: trainer.optimizer.param_groups[0].update(settings)


FORWARD, BACKWARD, UPDATE = "forward", "backward", "update"

DEFECTS: dict[tuple[str, str], Defect] = {
    ("recurrent", "nesterov"): Defect(group(nesterov=True), None, UPDATE, ("add",)),
    ("contrastive", "temperature_on_rank_1"): Defect(
        on_rank(1, attribute("temperature", 0.11)), "", FORWARD, ("div",), 1
    ),
    ("teacher", "other_rate"): Defect(attribute("rate", 0.02), None, UPDATE, ("lerp_",)),
    ("lora", "other_scale"): Defect(attribute("2.scale", 1.0), "2", FORWARD, ("mul",)),
    ("muon", "other_factor"): Defect(group(factor=1.4), None, UPDATE, ("mul",)),
    ("vision", "drops_more"): Defect(
        attribute("layer.dropout2.p", 0.2), "layer.dropout2", FORWARD, ("native_dropout", "bernoulli_")
    ),
    ("variational", "not_transposed"): Defect(
        lambda trainer: void(
            trainer.model.get_submodule("decoder.1").register_forward_hook(lambda _, args, y: y.transpose(2, 3))
        ),
        "decoder.1",
        FORWARD,
        ("transpose",),
    ),
    ("self_compiled", "other_beta"): Defect(attribute("1.beta", 1.1), "1", FORWARD, ("softplus",)),
}


def __getattr__(name: str) -> Any:
    """The factory of a system: a kind, or a kind, two underscores and a defect."""
    kind, _, defect = name.partition("__")
    if kind not in KINDS or (defect and (kind, defect) not in DEFECTS):
        raise AttributeError(name)

    def make(case: Case, mesh: Mesh) -> Any:
        trainer: Any = KINDS[kind](mesh)
        if defect:
            DEFECTS[kind, defect].put_in(trainer)
        return watch(trainer.step, model=trainer.model, optimizer=trainer.optimizer)

    return make
