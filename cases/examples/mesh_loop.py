"""A training loop with several layouts of ranks, as systems: the same model, text and global batch in each.

    bitproof run -k layouts

    ddp         every rank has the model, in DistributedDataParallel if there are several ranks
    fsdp        parameters sharded over all ranks
    hsdp        sharded over half of the ranks, replicated twice
    fsdp_tp     sharded over data ranks, each layer split over `tp` ranks
    ep          experts split over `ep` ranks, which send each other their tokens
    halves      as ddp, the batch in two micro-batches
    uneven, uneven_halves       as ddp and halves, with texts of different lengths: ranks and micro-batches have
                                different numbers of tokens, and the loss is the mean of all tokens

The loss is that of the global batch, so it is the same on any number of ranks. Each rank yields its part of a tensor as
a DTensor, whose placements state the part. For example, of 61 rows of an embedding on 2 ranks, rank 0 yields rows 0 to
30.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy, gelu
from torch.nn.parallel import DistributedDataParallel

from bitproof import Case, Mesh
from bitproof.harness.case import observed_modules
from bitproof.harness.torch_distributed import functional_collectives

VOCABULARY, DIM, HIDDEN, EXPERTS, SEQUENCES, LENGTH = 61, 24, 64, 4, 8, 12
"""Default sizes. A case's options may override `dim`, `rows` and `length`.

No number of ranks divides the size of the vocabulary, so its rows are sharded unevenly.
"""

NOTHING = -100
"""The padding after the end of a row's text."""


class Block(nn.Module):
    """A residual MLP."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, HIDDEN)
        self.down = nn.Linear(HIDDEN, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(gelu(self.up(self.norm(x))))
        return y


class SharedExperts(nn.Module):
    """A layer of experts that are split over ranks. Each token goes to a single expert.

    `mesh` has the axes `replicas` and `ep`. Without a mesh, this rank has all experts.
    """

    def __init__(self, mesh: DeviceMesh | None, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.router = nn.Linear(dim, EXPERTS, bias=False)
        self.mesh = mesh
        # All ranks draw all experts and keep their own, so the values do not depend on the number of ranks.
        weight = torch.randn(EXPERTS, dim, dim) / dim**0.5
        self.weight = nn.Parameter(weight.chunk(self.ranks)[self.rank].clone())

    @property
    def ranks(self) -> int:
        return self.mesh["ep"].size() if self.mesh else 1

    @property
    def rank(self) -> int:
        """Return this rank's index among the ranks that share the experts."""
        return int(self.mesh["ep"].get_local_rank()) if self.mesh else 0

    def shown(self, part: Tensor) -> Tensor:
        """Return this rank's part of the weights as a DTensor, whose placements state which experts the part has."""
        return part if self.mesh is None else DTensor.from_local(part, self.mesh, [Replicate(), Shard(0)])

    def forward(self, x: Tensor) -> Tensor:
        """Apply each token's expert to tokens (.., D): gather all ranks' tokens, then sum and scatter the results."""
        rows_TD = self.norm(x).flatten(0, 1)
        scores_TE = self.router(rows_TD).softmax(-1)
        if self.mesh is not None:
            rows_TD, scores_TE = (
                functional_collectives().all_gather_tensor_autograd(y, 0, self.mesh["ep"]) for y in (rows_TD, scores_TE)
            )
        weight_T, expert_T = scores_TE.max(-1)
        # Tokens of experts on other ranks stay zero, and the sum over ranks adds each token once.
        out_TD = torch.zeros_like(rows_TD)
        for index, weight_DD in enumerate(self.weight):
            token = (expert_T == self.rank * len(self.weight) + index).nonzero()[:, 0]
            out_TD = out_TD.index_put((token,), rows_TD[token] @ weight_DD * weight_T[token, None])
        if self.mesh is not None:
            out_TD = functional_collectives().reduce_scatter_tensor_autograd(out_TD, "sum", 0, self.mesh["ep"])
        y: Tensor = x + out_TD.view_as(x)
        return y


class MixedModel(nn.Module):
    """Predicts each token from the previous token. With `has_experts`, the second block is a layer of experts."""

    def __init__(self, experts: DeviceMesh | None = None, *, has_experts: bool = False, dim: int = DIM) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, dim)
        self.blocks = nn.ModuleList(SharedExperts(experts, dim) if has_experts and i else Block(dim) for i in range(2))
        self.output = nn.Linear(dim, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.output(x)
        return logits


class MeshLoop:
    """A training run on this rank's share of each batch, in `micro` micro-batches.

    `sharers` ranks read the same rows: with 2 sharers, 8 ranks divide a batch into 4 shares.
    """

    def __init__(self, case: Case, mesh: Mesh, model: nn.Module, *, sharers: int = 1, micro: int = 1) -> None:
        self.rank, self.readers = mesh.rank // sharers, case.parallelism.world_size // sharers
        self.world, self.micro, self.model = case.parallelism.world_size, micro, model
        # DistributedDataParallel puts "module." before each name; names must be equal in all layouts.
        self.names = {"module.*": "*"} if isinstance(model, DistributedDataParallel) else {}
        self.independent_ranks = self.world == 1
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
        # A warm-up of four steps: a resumed run that forgets the schedule differs.
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: min(1.0, (step + 1) / 4))
        self.data = torch.Generator().manual_seed(1000 + case.seed)
        self.size = case.options.get("rows", SEQUENCES), case.options.get("length", LENGTH) + 1
        self.outputs: dict[str, Tensor] = {}
        if case.observe:
            self.observe(case.observe, sharers)

    def observe(self, patterns: Sequence[str], sharers: int) -> None:
        """Register hooks that store the outputs of the modules that match `patterns`, as DTensors.

        They are sharded by rows, and replicated over the ranks that read the same rows.
        """
        grid = init_device_mesh("cpu", (self.readers, sharers))
        modules = dict(_bare(self.model).named_modules())

        def keep(name: str, out: Tensor) -> None:
            self.outputs[f"{name}@forward"] = DTensor.from_local(out.detach(), grid, [Shard(0), Replicate()])

        for name in observed_modules(patterns, modules):
            modules[name].register_forward_hook(lambda module, args, out, name=name: keep(name, out))

    def batch(self) -> Tensor:
        return self.rows().chunk(self.readers)[self.rank]

    def rows(self) -> Tensor:
        """Draw the global batch, (rows, length + 1) tokens. All ranks draw the same, as their generators are equal."""
        return torch.randint(VOCABULARY, self.size, generator=self.data)

    def loss(self, rows: Tensor) -> Tensor:
        return cross_entropy(self.model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())

    def backward(self) -> Tensor:
        """Add the gradients of this rank's rows to the parameters' gradients. Returns the loss of the global batch."""
        total = torch.zeros(())
        for rows in self.batch().chunk(self.micro):
            # Divided before backward, so that gradients of micro-batches add up to those of the mean.
            loss = self.loss(rows) / self.micro
            loss.backward()
            total += loss.detach()
        if self.world > 1:
            dist.all_reduce(total)
        return total / self.world

    def shown(self, name: str, part: Tensor) -> Tensor:
        """Return the tensor to yield for `part`, this rank's part of a parameter, gradient or moment.

        Here it is `part` itself; a subclass may return a DTensor.
        """
        return part

    def step(self, index: int) -> Iterator[tuple[str, str, Tensor]]:
        """Take a step, and yield (kind, name, tensor) for each value as soon as it is computed."""
        loss = self.backward()
        for name, out in self.outputs.items():
            yield "activation", name, out
        yield "loss", "loss", loss
        for name, parameter in self.model.named_parameters():
            assert parameter.grad is not None
            yield "grad", name, self.shown(name, parameter.grad)
        self.optimizer.step()
        self.schedule.step()
        for name, parameter in self.model.named_parameters():
            yield "param", name, self.shown(name, parameter)
            for state, value in self.optimizer.state[parameter].items():
                yield "optimizer", f"{name}.{state}", self.shown(name, value) if value.dim() else value
        # State that a resumed run must restore.
        yield "buffer", "learning_rate@after_optimizer", torch.tensor(self.schedule.get_last_lr())
        yield "buffer", "data@after_optimizer", self.data.get_state()
        self.optimizer.zero_grad()

    def save(self, folder: Path) -> None:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        own = {"data": self.data.get_state(), "schedule": self.schedule.state_dict()}
        dcp.save({"model": model, "optimizer": optimizer, **own}, checkpoint_id=folder)

    def load(self, folder: Path) -> None:
        """Resume from a saved state, possibly with another layout of ranks."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        # `dcp.load` writes into tensors of this layout, so there must be a state before it loads one.
        own: dict[str, Any] = {"data": self.data.get_state(), "schedule": self.schedule.state_dict()}
        state = {"model": model, "optimizer": optimizer, **own}
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)
        self.data.set_state(state["data"])
        self.schedule.load_state_dict(state["schedule"])


class UnevenLoop(MeshLoop):
    """A `MeshLoop` with texts of different lengths."""

    def rows(self) -> Tensor:
        """Draw the batch, and replace all tokens after the end of each text by the padding NOTHING."""
        rows = super().rows()
        # Every text has at least two tokens to predict.
        ends = torch.randint(2, rows.size(1), (rows.size(0), 1), generator=self.data)
        return rows.masked_fill(torch.arange(rows.size(1)) > ends, NOTHING)

    def count(self, rows: Tensor) -> Tensor:
        return (rows[:, 1:] != NOTHING).sum()

    def mean(self, rows: Tensor, tokens: Tensor) -> Tensor:
        """Return these rows' share of the mean loss over all ranks' `tokens` tokens, times the number of ranks."""
        # The padding is no token: 0 in its place is embedded, and the loss ignores it.
        logits = self.model(rows[:, :-1].clamp(min=0)).flatten(0, 1)
        loss = cross_entropy(logits, rows[:, 1:].flatten(), ignore_index=NOTHING, reduction="sum")
        # DistributedDataParallel divides gradients by the number of ranks, so the loss is multiplied by it.
        return loss * self.world / tokens

    def backward(self) -> Tensor:
        """Add the gradients of the mean loss over all ranks' tokens to the parameters' gradients. Returns that loss."""
        rows, total = self.batch(), torch.zeros(())
        # The number of tokens of all ranks and micro-batches, before any backward: the loss needs it.
        tokens = self.count(rows)
        if self.world > 1:
            dist.all_reduce(tokens)
        for part in rows.chunk(self.micro):
            loss = self.mean(part, tokens)
            loss.backward()
            total += loss.detach()
        if self.world > 1:
            dist.all_reduce(total)
        return total / self.world


class ExpertLoop(MeshLoop):
    """A `MeshLoop` with experts split over `ep` ranks.

    It averages gradients itself, since experts' gradients are summed over fewer ranks than all others.
    """

    def __init__(self, case: Case, mesh: Mesh) -> None:
        ep = case.parallelism.ep
        grid = init_device_mesh("cpu", (case.parallelism.world_size // ep, ep), mesh_dim_names=("replicas", "ep"))
        super().__init__(case, mesh, MixedModel(grid, has_experts=True, dim=_dim(case)))
        self.replicas = grid["replicas"].get_group()
        self.experts: SharedExperts = self.model.blocks[1]  # type: ignore[index,assignment]

    def backward(self) -> Tensor:
        """Compute gradients, and average them over all ranks' rows. Returns the loss of the global batch.

        An expert's gradient is summed over the ranks that have the expert, and any other gradient over all ranks.
        """
        total = super().backward()
        for parameter in self.model.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad, group=self.replicas if parameter is self.experts.weight else None)
            parameter.grad /= self.world
        return total

    def shown(self, name: str, part: Tensor) -> Tensor:
        """Return a part of the experts' weights as a DTensor; any other tensor unchanged."""
        return self.experts.shown(part) if name == "blocks.1.weight" else part


def _dim(case: Case) -> int:
    return int(case.options.get("dim", DIM))


def _bare(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, DistributedDataParallel) else model


def ddp(case: Case, mesh: Mesh, micro: int = 1, loop: type[MeshLoop] = MeshLoop) -> MeshLoop:
    model: nn.Module = MixedModel(dim=_dim(case))
    return loop(case, mesh, DistributedDataParallel(model) if case.parallelism.world_size > 1 else model, micro=micro)


def halves(case: Case, mesh: Mesh) -> MeshLoop:
    return ddp(case, mesh, micro=2)


def uneven(case: Case, mesh: Mesh) -> MeshLoop:
    return ddp(case, mesh, loop=UnevenLoop)


def uneven_halves(case: Case, mesh: Mesh) -> MeshLoop:
    return ddp(case, mesh, micro=2, loop=UnevenLoop)


def sharded(model: nn.Module, grid: DeviceMesh) -> nn.Module:
    """Shard each block, and then the remaining parameters, over a mesh. Returns the model."""
    for module in (*model.blocks, model):  # type: ignore[misc]
        fully_shard(module, mesh=grid)
    return model


def fsdp(case: Case, mesh: Mesh) -> MeshLoop:
    model = sharded(MixedModel(dim=_dim(case)), init_device_mesh("cpu", (case.parallelism.world_size,)))
    return MeshLoop(case, mesh, model)


def hsdp(case: Case, mesh: Mesh) -> MeshLoop:
    grid = init_device_mesh("cpu", (2, case.parallelism.world_size // 2), mesh_dim_names=("replicas", "shards"))
    return MeshLoop(case, mesh, sharded(MixedModel(dim=_dim(case)), grid))


def split_and_sharded(model: nn.Module, case: Case) -> nn.Module:
    """Split each block over `tp` ranks that read the same rows. Returns the model.

    The model is then sharded over the ranks that read different rows.
    """
    tp = case.parallelism.tp
    grid = init_device_mesh("cpu", (case.parallelism.world_size // tp, tp), mesh_dim_names=("data", "tp"))
    for block in model.blocks:  # type: ignore[union-attr]
        parallelize_module(block, grid["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return sharded(model, grid["data"])


def fsdp_tp(case: Case, mesh: Mesh) -> MeshLoop:
    return MeshLoop(case, mesh, split_and_sharded(MixedModel(dim=_dim(case)), case), sharers=case.parallelism.tp)


def ep(case: Case, mesh: Mesh) -> MeshLoop:
    return ExpertLoop(case, mesh)
