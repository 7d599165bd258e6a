"""Fully sharded parameters: each of W ranks stores 1/W of a parameter, and all ranks gather it when a module reads it.

A shard has the rank's rows of dim 0, in float32. It is padded with zero rows, so that all ranks have the same shape and
can run the same traced graph. When a module reads the parameter as its attribute:

    forward     casts the shard to the compute dtype and all-gathers it
    backward    casts the gradient to the reduce dtype, reduce-scatters it (a sum over ranks, in rank
                order on gloo) and casts the rows to the parameter's dtype; if each tensor-parallel rank has
                a part of the gradient, sums it over those ranks first

A replicated parameter is whole on every rank of the group. It is not gathered, and an all-reduce sums its gradient. A
module whose forward runs twice gathers and reduces twice, as in SimpleFSDP (https://arxiv.org/abs/2411.00284).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from bitproof.harness.case import Precision
from bitproof.harness.errors import CaseError
from bitproof.harness.torch_compat import registered_parameter
from bitproof.reference.init import initial_values
from bitproof.reference.parallel.collectives import all_gather, all_reduce, reduce_scatter
from bitproof.reference.parallel.mesh import EXPERT, EXPERT_FSDP, FSDP, TENSOR, Mesh

_SHARED = {EXPERT: "every rank holds as many experts", TENSOR: "every rank holds as many features"}
_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class Sharding:
    """A parameter's layout: the `size` ranks of `group` shard `rows` rows of it.

    - `part`: the part of the parameter that these ranks have, as arguments of `narrow`: (dim, first, extent). It is the
      whole parameter unless expert or tensor parallelism splits it.
    - `compute`, `reduce`: the dtypes of the gathered parameter, and of the sum of gradients.
    - `is_summed`: True if each rank of the tensor group has the whole parameter, and its gradient is summed over that
      group.
    - `copies`: the number of tensor ranks with the same rows.
    - `is_replicated`: True if every rank of `group` has all rows. Then `size` is 1.
    """

    group: str
    size: int
    part: tuple[int, int, int]
    rows: int
    compute: torch.dtype
    reduce: torch.dtype
    is_summed: bool = False
    copies: int = 1
    is_replicated: bool = False

    @property
    def rows_per_rank(self) -> int:
        """Return the number of rows of a rank's shard, padding included."""
        return -(-self.rows // self.size)

    def local_rows(self, whole: Tensor, coordinate: int) -> Tensor:
        """Return the rows of the parameter `whole` that the rank at `coordinate` of the group
        stores, without padding.
        """
        start = 0 if self.is_replicated else coordinate * self.rows_per_rank
        return whole.narrow(*self.part)[start : start + self.rows_per_rank]


class LocalSums:
    """The sums of parameters' gradients over micro-batches on this rank, before they are reduced over ranks.

    Used as a context, in which backward adds to `totals` and returns no gradients.
    """

    entered: ClassVar[LocalSums | None] = None

    def __init__(self) -> None:
        self.totals: dict[nn.Parameter, tuple[Tensor, Sharding]] = {}

    def __enter__(self) -> LocalSums:
        LocalSums.entered = self
        return self

    def __exit__(self, *_: object) -> None:
        LocalSums.entered = None

    def add(self, parameter: nn.Parameter, grad: Tensor, sharding: Sharding) -> None:
        """Add a micro-batch's gradient, in the dtype of the reduction. Call this in the order of micro-batches."""
        grad = grad.to(sharding.reduce)
        total = self.totals.get(parameter)
        self.totals[parameter] = (grad if total is None else total[0] + grad, sharding)

    def reduced(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
        """Sum the totals over ranks, in the order of `parameters`. Returns this rank's rows by name."""
        return {name: reduce_gradient(*self.totals[parameter]) for name, parameter in parameters.items()}


def reduce_gradient(grad: Tensor, sharding: Sharding) -> Tensor:
    """Sum `grad` (rows, ...) over ranks; returns this rank's rows in float32."""
    padding = sharding.rows_per_rank * sharding.size - sharding.rows
    grad = grad.to(sharding.reduce)
    if sharding.is_summed:
        # Before the reduction over data ranks, which then sums whole gradients.
        grad = all_reduce(grad.contiguous(), TENSOR)
    if sharding.is_replicated:
        return all_reduce(grad.contiguous(), sharding.group).to(torch.float32)
    if padding:
        # `pad` takes two sizes per dim, from the last dim to the first.
        grad = functional.pad(grad, [0, 0] * (grad.dim() - 1) + [0, padding])
    return reduce_scatter(grad.contiguous(), sharding.size, sharding.group).to(torch.float32)


class Unshard(torch.autograd.Function):
    """Gathers a parameter from the ranks' shards, in the compute dtype.

    Its backward sums the gradient over ranks and returns this rank's rows. If `sums` is given, backward passes the
    gradient to it instead, and returns None.
    """

    @staticmethod
    def forward(ctx: Any, shard: Tensor, sharding: Sharding, sums: Callable[[Tensor], None] | None) -> Tensor:
        """All-gather `shard` (rows_per_rank, ...) into (rows, ...)."""
        ctx.sharding, ctx.sums = sharding, sums
        if sharding.is_replicated:
            return shard.to(sharding.compute)
        full = all_gather(shard.to(sharding.compute), sharding.size, sharding.group)
        return full if full.shape[0] == sharding.rows else full.narrow(0, 0, sharding.rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None]:
        """Sum `grad` (rows, ...) over ranks; returns this rank's rows in float32."""
        if ctx.sums is None:
            return reduce_gradient(grad, ctx.sharding), None, None
        ctx.sums(grad)
        return None, None, None


def fully_shard(
    model: nn.Module,
    mesh: Mesh,
    precision: Precision,
    seed: int,
    device: torch.device,
    tensor_dims: Mapping[str, int | None] | None = None,
    *,
    spread: bool = False,
    replicated: Collection[str] = (),
    values_of: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Replace every parameter of `model`, in place, by this rank's shard with its initial values.

    - Routed experts are split over the expert group, and then sharded over the expert-FSDP group. All other parameters
      are sharded over the FSDP group.
    - `tensor_dims`: maps a parameter's name to the dim along which the tensor group splits it before it is sharded.
      With None the parameter stays whole, and its gradient is summed over the tensor group.
    - `spread`: as for `initial_values`.
    - `replicated`: names of parameters that are whole on each rank of the group over which they would be sharded.
    - `values_of`: maps a parameter's name to another name, whose initial values it gets.

    A parameter that several modules share becomes a single shard, with the initial values of its first name. On the
    meta device no values are made. Raises CaseError for an unknown name in `replicated`, and for modules that need
    different layouts of a shared parameter.
    """
    tied = _tied_parameters(model)
    shards: dict[str, tuple[Sharding, nn.Parameter]] = {}
    if unknown := set(replicated) - dict(model.named_parameters()).keys():
        raise CaseError(
            "a plan places parameters that the model does not have",
            expected="names of the model's parameters",
            found=", ".join(sorted(unknown)),
        )
    for prefix, module in model.named_modules():
        is_expert = hasattr(module, "exchange")
        shardings = {}
        for name, parameter in module.named_parameters(recurse=False):
            path, dims = f"{prefix}.{name}", tensor_dims or {}
            dim = 0 if is_expert else dims.get(path)
            part = _part(parameter.shape, dim, mesh, EXPERT if is_expert else TENSOR)
            sharding = _sharding(parameter.shape, part, mesh, precision, is_expert)
            if path in replicated:
                sharding = replace(sharding, size=1, is_replicated=True)
            # A parameter that no dim splits is on every rank of the tensor group.
            copies = mesh.size(TENSOR) if dim is None else 1
            sharding = replace(sharding, is_summed=path in dims and dim is None, copies=copies)
            first = tied.get(path, path)
            # The first name of a tied parameter makes the shard, and the modules of its other names register the same
            # one.
            if first not in shards:
                source = values_of.get(path, path)
                shard = _initial_shard(source, parameter.shape, sharding, mesh, seed, device, spread)
                shards[first] = sharding, nn.Parameter(shard)
            if shards[first][0] != sharding:
                raise CaseError(
                    f"{path} cannot be one parameter with {first}, as the ranks share the two in different ways",
                    expected=str(shards[first][0]),
                    found=str(sharding),
                    fix="untie them",
                )
            shardings[name] = sharding
            module.register_parameter(name, shards[first][1])
        if shardings:
            # Only the class is replaced, so the module's parameters, their names and its hooks stay.
            module.__class__ = _unsharding_class(type(module), shardings)


def _tied_parameters(model: nn.Module) -> dict[str, str]:
    """Return, for each parameter that several modules share, each further name -> its first name."""
    first: dict[nn.Parameter, str] = {}
    every = model.named_parameters(remove_duplicate=False)
    found = {name: first.setdefault(parameter, name) for name, parameter in every}
    return {name: owner for name, owner in found.items() if name != owner}


def _part(shape: torch.Size, dim: int | None, mesh: Mesh, group: str) -> tuple[int, int, int]:
    """Return this rank's part of a parameter that `group` splits evenly along `dim`, as (dim, first, extent) for
    `narrow`.

    If `dim` is None, this is the whole parameter. Raises CaseError if the split is uneven.
    """
    if dim is None:
        return 0, 0, shape[0]
    if shape[dim] % mesh.size(group):
        raise CaseError(
            f"ranks of group {group} cannot share a parameter evenly",
            expected=f"an extent that {mesh.size(group)} divides along dim {dim}: {_SHARED[group]}",
            found=f"shape {tuple(shape)}",
            fix=f"choose another model size, or another {group}",
        )
    extent = shape[dim] // mesh.size(group)
    return dim, mesh.coordinate(group) * extent, extent


def _sharding(
    shape: torch.Size, part: tuple[int, int, int], mesh: Mesh, precision: Precision, is_expert: bool
) -> Sharding:
    group = EXPERT_FSDP if is_expert else FSDP
    dim, _, extent = part
    return Sharding(
        group=group,
        size=mesh.size(group),
        part=part,
        rows=extent if dim == 0 else shape[0],
        compute=_DTYPES[precision.compute],
        reduce=_DTYPES[precision.reduce],
    )


def _initial_shard(
    name: str, shape: torch.Size, sharding: Sharding, mesh: Mesh, seed: int, device: torch.device, spread: bool
) -> Tensor:
    if device.type == "meta":
        whole = torch.empty(shape, device="meta")
    else:
        whole = initial_values(name, tuple(shape), seed, spread=spread)
    rows = sharding.local_rows(whole, mesh.coordinate(sharding.group))
    shard = torch.zeros(sharding.rows_per_rank, *rows.shape[1:], dtype=torch.float32, device=device)
    shard[: len(rows)] = rows.to(device)
    return shard


def _unsharding_class(cls: type[nn.Module], shardings: dict[str, Sharding]) -> type[nn.Module]:
    """Return a subclass of `cls` whose attributes in `shardings` gather the parameter when they are read.

    The parameters stay registered under their names, so `named_parameters` yields the shards.
    """

    # Python looks a property up before it calls `nn.Module.__getattr__`, which would return the shard itself.
    def reader(name: str) -> property:
        def read(module: nn.Module) -> Tensor:
            parameter, sums = registered_parameter(module, name), LocalSums.entered
            assert parameter is not None, "every parameter of `shardings` is registered"
            add = partial(sums.add, parameter, sharding=shardings[name]) if sums else None
            return Unshard.apply(parameter, shardings[name], add)  # type: ignore[no-untyped-call]

        return property(read)

    readers = {name: reader(name) for name in shardings}
    return type(f"Sharded{cls.__name__}", (cls,), {**readers, "shardings": shardings})


def placement_hash(model: nn.Module) -> str:
    """Return the SHA-256 of the layouts of all parameters. It is equal on all ranks."""
    # Without the index `part[1]` at which a rank's part begins: it differs from rank to rank.
    layouts = [
        [name, x.group, x.size, x.part[0], x.part[2], x.rows, x.is_summed, x.copies, x.is_replicated]
        for name, x in shardings_of(model).items()
    ]
    return hashlib.sha256(json.dumps(layouts).encode()).hexdigest()


def shardings_of(model: nn.Module) -> dict[str, Sharding]:
    """Return parameter name -> layout, for a model that `fully_shard` has sharded."""
    found: dict[str, Sharding] = {}
    for prefix, module in model.named_modules():
        own: Mapping[str, Sharding] = getattr(module, "shardings", {})
        found |= {f"{prefix}.{name}": sharding for name, sharding in own.items()}
    return found
