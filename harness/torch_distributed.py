"""Wraps private names of torch.distributed, and names that differ between the supported releases."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import torch
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroup, ReduceOp
from torch.distributed import distributed_c10d


def functional_collectives() -> Any:
    """Return torch's module of functional collectives. Its functions named `..._autograd` are differentiable."""
    import torch.distributed._functional_collectives as collectives

    return collectives


def group_of(boxed: Any) -> Any:
    """Unbox a process group: operators receive it as a TorchScript object."""
    return ProcessGroup.unbox(boxed)


def name_of_group(boxed: Any) -> str:
    """Return the name of a process group that is boxed as an operator's argument; "" for an unnamed group."""
    with suppress(RuntimeError, TypeError, ValueError):
        return str(ProcessGroup.unbox(boxed).group_name)
    return ""


def averages(reduction: Any) -> bool:
    """Return whether a reduction is an average: the sum is divided by the number of ranks."""
    # Functional collectives take the reduction as text, c10d's operators as a boxed object.
    if isinstance(reduction, str):
        return reduction.lower() == "avg"
    is_boxed = isinstance(reduction, torch.ScriptObject) and cast(Any, reduction)._has_method("op")
    return is_boxed and bool(reduction.op() == int(cast(Any, ReduceOp.AVG)))


def register_group(name: str, group: Any) -> None:
    """Register a process group under a name that collectives can use.

    The caller must keep a reference to the group, because torch keeps none.
    """
    torch._C._distributed_c10d._register_process_group(cast(Any, name), group)


def group_named(name: str) -> ProcessGroup:
    """Return the process group registered under `name`. Raises RuntimeError if there is none."""
    return torch._C._distributed_c10d._resolve_process_group(cast(Any, name))


def parts_of(placement: Any, indices: Tensor, ranks: int) -> list[Tensor]:
    """Split `indices` among ranks, the way a DTensor placement such as `Shard(0)` splits a dim of this length."""
    from torch.distributed.tensor import Shard

    # Interleaved shards have a split factor.
    factor = getattr(placement, "split_factor", None)
    along: Any = Shard(0) if factor is None else type(placement)(0, split_factor=factor)
    parts: list[Tensor] = along._split_tensor(indices, ranks, with_padding=False, contiguous=False)[0]
    return parts


def flattened_parts(model: Any) -> dict[int, tuple[tuple[int, ...], int, int]]:
    """Return id -> (shape, start, end) for each original parameter that FSDP1 has flattened.

    This rank holds the elements `start` to `end` (exclusive) of the parameter; both are 0 if it holds none. Parameters
    are found only with `use_orig_params`.
    """
    from torch.distributed.fsdp import FullyShardedDataParallel

    found = {}
    for module in model.modules():
        handle = getattr(module, "_handle", None) if isinstance(module, FullyShardedDataParallel) else None
        flat: Any = getattr(handle, "flat_param", None)
        if flat is None or not flat._params:  # no parameters of its own, or only the flat parameter is kept
            continue
        for parameter, shape, part in zip(flat._params, flat._shapes, flat._shard_param_infos, strict=True):
            ends = (part.intra_param_start_idx, part.intra_param_end_idx + 1) if part.in_shard else (0, 0)
            found[id(parameter)] = (tuple(shape), *ends)
    return found


def flat_collectives(group: ProcessGroup) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return a pair of functions: a group's all-gather and reduce-scatter on flat tensors. Both take (output, input).

    For W ranks, the all-gather has an input of shape (N) and an output of shape (W * N).
    """
    return group._allgather_base, group._reduce_scatter_base


def unregister_group(name: str) -> None:
    torch._C._distributed_c10d._unregister_process_group(cast(Any, name))


def group_of_size(size: int) -> Any:
    """Return a process group of this size that is not connected to other ranks."""
    return cast(Any, ProcessGroup)(0, size)


def set_timeout(options: Any, timeout: Any) -> None:
    # torch reads it there, and not from the argument of `new_group`.
    options._timeout = timeout


def collectives_by_group() -> dict[str, int]:
    """Return group name -> number of collectives launched by this process.

    Groups of a single rank, or of a backend without a counter, are left out. Gloo also counts point-to-point messages.
    """
    found = {}
    for group, name in distributed_c10d._world.pg_names.items():
        if group.size() > 1:
            with suppress(RuntimeError):  # a backend without a counter
                found[str(name)] = cast(Any, group)._get_sequence_number_for_group()
    return found


@contextmanager
def on_point_to_point(called: Callable[[], None]) -> Iterator[None]:
    """Context in which `called` is called at each point-to-point send or receive."""

    def reporting(own: Callable[..., Any]) -> Callable[..., Any]:
        def call(group: ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            if group.size() > 1:
                called()
            return own(group, *args, **kwargs)

        return call

    with ExitStack() as stack:
        for name in ("send", "recv", "recv_anysource"):
            stack.enter_context(mock.patch.object(ProcessGroup, name, reporting(getattr(ProcessGroup, name))))
        yield


def sharding_rules() -> SimpleNamespace:
    """Return DTensor's sharding propagation as attributes of one object.

    - `propagator`: finds the shardings that an operator supports.
    - `OpSchema`, `OpSpec`, `OpStrategy`, `TupleStrategy`, `DTensorSpec`, `TensorMeta`: its argument and result classes.
    - `cost`: cost of a redistribution.
    - `line(n)`: a 1-D mesh of n ranks without process groups.
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, _collective_utils, _dtensor_spec, _op_schema

    found = {name: getattr(_op_schema, name) for name in ("OpSchema", "OpSpec", "OpStrategy", "TupleStrategy")}
    found |= {name: getattr(_dtensor_spec, name) for name in ("DTensorSpec", "TensorMeta")}
    # A mesh without process groups, as only the sizes of shards matter.
    line = functools.cache(lambda n: DeviceMesh("cpu", torch.arange(n, device="cpu"), _init_backend=False, _rank=0))
    propagator = DTensor._op_dispatcher.sharding_propagator
    return SimpleNamespace(**found, line=line, propagator=propagator, cost=_collective_utils.redistribute_cost)


# The tables in which torch keeps the process groups of this process.
_TABLES = (
    "pg_map",
    "pg_names",
    "pg_group_ranks",
    "pg_backend_config",
    "tags_to_pg",
    "pg_to_tag",
    "pg_coalesce_state",
)


class KnownGroups:
    """torch's global tables of process groups, including the default group. `KnownGroups()` is empty."""

    def __init__(self, default: Any = None, count: int = 0, tables: Sequence[dict[Any, Any]] = ()) -> None:
        self.default = default
        self._count = count
        self._tables = tables or [{} for _ in _TABLES]

    def exchange(self) -> KnownGroups:
        """Install these tables in torch, and return the previous tables.

        No group is destroyed, and nothing is communicated.
        """
        world = distributed_c10d._world
        tables = [getattr(world, name) for name in _TABLES]
        before = KnownGroups(world.default_pg, world.group_count, [dict(table) for table in tables])
        for table, content in zip(tables, self._tables, strict=True):
            # torch's functions refer to these very dictionaries, so their content is replaced.
            table.clear()
            table.update(content)
        world.group_count = self._count
        distributed_c10d._update_default_pg(self.default)
        return before


def replace_function(own: Callable[..., Any], new: Callable[..., Any]) -> None:
    """Replace the global `own` by `new` in each loaded module under torch.distributed."""
    for name, module in tuple(sys.modules.items()):
        if name.startswith("torch.distributed") and vars(module).get(own.__name__) is own:
            setattr(module, own.__name__, new)
