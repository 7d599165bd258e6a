"""Fully sharded parameters: each rank stores 1/W of a parameter and gathers it where it is read.

A parameter lives as this rank's rows of dim 0, in float32, padded with zero rows so that all ranks
hold the same shape (one traced graph then fits every rank). Reading the attribute of its module

    forward     casts the shard to the compute dtype and all-gathers it
    backward    casts the gradient to the reduce dtype, reduce-scatters it (a sum over ranks, in rank
                order on gloo) and casts the rows to the parameter's dtype

so a module whose forward runs twice gathers twice and reduces twice, as in SimpleFSDP
(https://arxiv.org/abs/2411.00284).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from harness.case import Precision
from reference.init import initial_values
from reference.parallel.collectives import all_gather, reduce_scatter
from reference.parallel.mesh import EXPERT, EXPERT_FSDP, FSDP, Mesh

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class Sharding:
    """How one parameter lies on the ranks: rows [first, first + rows) over `size` ranks of `group`."""

    group: str
    size: int
    first: int
    rows: int
    compute: torch.dtype
    reduce: torch.dtype

    @property
    def rows_per_rank(self) -> int:
        """Rows of one rank's shard, padding included."""
        return -(-self.rows // self.size)

    def local_rows(self, coordinate: int) -> slice:
        """The full parameter's rows that the rank at `coordinate` stores (fewer at the end, or none)."""
        start = min(coordinate * self.rows_per_rank, self.rows)
        return slice(self.first + start, self.first + min(start + self.rows_per_rank, self.rows))


class Unshard(torch.autograd.Function):
    """shard -> full parameter in the compute dtype; gradient -> this rank's rows of its sum over ranks."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, sharding: Sharding) -> Tensor:
        """All-gather `shard` (rows_per_rank, ...) into (rows, ...)."""
        ctx.sharding = sharding
        full = all_gather(shard.to(sharding.compute), sharding.size, sharding.group)
        return full if full.shape[0] == sharding.rows else full.narrow(0, 0, sharding.rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Sum `grad` (rows, ...) over ranks; returns this rank's rows in float32."""
        sharding: Sharding = ctx.sharding
        padding = sharding.rows_per_rank * sharding.size - sharding.rows
        grad = grad.to(sharding.reduce)
        if padding:
            grad = functional.pad(grad, [0, 0] * (grad.dim() - 1) + [0, padding])
        rows = reduce_scatter(grad.contiguous(), sharding.size, sharding.group)
        return rows.to(torch.float32), None


def fully_shard(model: nn.Module, mesh: Mesh, precision: Precision, seed: int, device: torch.device) -> None:
    """Replace every parameter of `model`, in place, by this rank's shard, holding its initial values.

    Parameters below a module that has an `exchange` (the routed experts) are split over the expert
    group first and sharded over the expert-FSDP group; all others are sharded over all ranks. On the
    meta device no values are made.
    """
    for prefix, module in model.named_modules():
        is_expert = hasattr(module, "exchange")
        shardings = {}
        for name, parameter in module.named_parameters(recurse=False):
            sharding = shardings[name] = _sharding(parameter, mesh, precision, is_expert)
            coordinate = mesh.coordinate(sharding.group)
            shard = _initial_shard(f"{prefix}.{name}", parameter.shape, sharding, coordinate, seed, device)
            module.register_parameter(name, nn.Parameter(shard))
        if shardings:
            module.__class__ = _unsharding_class(type(module), shardings)


def _sharding(parameter: Tensor, mesh: Mesh, precision: Precision, is_expert: bool) -> Sharding:
    group = EXPERT_FSDP if is_expert else FSDP
    first, rows = 0, parameter.shape[0]
    if is_expert:
        rows //= mesh.size(EXPERT)
        first = rows * mesh.coordinate(EXPERT)
    return Sharding(
        group=group,
        size=mesh.size(group),
        first=first,
        rows=rows,
        compute=_DTYPES[precision.compute],
        reduce=_DTYPES[precision.reduce],
    )


def _initial_shard(
    name: str, shape: torch.Size, sharding: Sharding, coordinate: int, seed: int, device: torch.device
) -> Tensor:
    shard = torch.zeros(sharding.rows_per_rank, *shape[1:], dtype=torch.float32, device=device)
    if device.type != "meta":
        rows = initial_values(name, tuple(shape), seed)[sharding.local_rows(coordinate)]
        shard[: len(rows)] = rows.to(device)
    return shard


def _unsharding_class(cls: type[nn.Module], shardings: dict[str, Sharding]) -> type[nn.Module]:
    """A subclass of a module's class in which reading a sharded parameter unshards it.

    The parameter stays registered under its own name, so `named_parameters` yields shards.
    """

    def reader(name: str) -> property:
        return property(lambda module: Unshard.apply(module._parameters[name], shardings[name]))

    return type(f"Sharded{cls.__name__}", (cls,), {name: reader(name) for name in shardings})
