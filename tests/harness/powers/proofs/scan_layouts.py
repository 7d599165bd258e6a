"""Where a call's results lie: as real values, as fake ones, and how the two differ."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

from bitproof.harness.graph.tracing.fake_mode import step_fake_mode
from bitproof.harness.powers.proofs.prover import known_operators as known
from bitproof.harness.powers.proofs.prover.graphs.admitted import is_channels_last
from bitproof.harness.torch_compat import FakeTensorMode, OpOverload
from tests.harness.powers.proofs.scan_variants import Arguments, replaced, tensors_of


def lay_of(results: Sequence[Any], inputs: Sequence[Tensor]) -> list[Any]:
    """Each result's dtype, shape, strides, offset, and the first input or result that it shares memory with."""
    owners: dict[Any, str] = {}
    for number, x in enumerate(inputs):
        owners.setdefault(_memory(x), f"input {number}")
    found: list[Any] = []
    for number, x in enumerate(results):
        if isinstance(x, Tensor):
            owner = owners.setdefault(_memory(x), f"result {number}")
            found.append((x.dtype, tuple(x.shape), tuple(x.stride()), x.storage_offset(), owner))
        else:
            found.append(type(x).__name__.removeprefix("Sym").lower())
    return found


def _memory(x: Tensor) -> Any:
    storage = x.untyped_storage()
    return storage._cdata if x.device.type == "meta" or _is_fake(x) or not storage.nbytes() else storage.data_ptr()


def _is_fake(x: Tensor) -> bool:
    return isinstance(x, torch._subclasses.FakeTensor)


@functools.cache
def _mode() -> FakeTensorMode:
    return step_fake_mode(ShapeEnv(), remembers=False)


def fake_lay_of(op: OpOverload, args: Arguments) -> list[Any]:
    """The same of a call on fake values, which share memory where the arguments do."""
    mode = _mode()
    memories: dict[int, Tensor] = {}
    with mode, mode.shape_env.ignore_fresh_unbacked_symbols():

        def fake(x: Tensor) -> Tensor:
            storage = x.untyped_storage()
            key = storage._cdata
            if key not in memories:
                memories[key] = torch.empty(storage.nbytes() // x.element_size(), dtype=x.dtype)
            return memories[key].as_strided(x.shape, x.stride(), x.storage_offset())

        own = replaced(args, fake)
        return lay_of(pytree.tree_leaves(op(*own[0], **own[1])), tensors_of(own))


def difference(op: OpOverload, real: Sequence[Any], fake: Sequence[Any]) -> str | None:
    """How real results lie otherwise than fake ones; None where they do not, as far as sizes are numbers."""
    if len(real) != len(fake):
        return "it gives another number of results than its fake"
    for mine, other in zip(real, fake, strict=True):
        if not isinstance(mine, tuple) or not isinstance(other, tuple):
            if mine != other:
                return f"it gives a {mine if isinstance(mine, str) else 'tensor'} where its fake does not"
            continue
        if mine[0] != other[0]:
            return "its dtype is another than its fake's"
        if not all(isinstance(n, int) for n in (*other[1], *other[2], other[3])):
            continue
        if mine[1] != other[1]:
            return "its shape is another than its fake's"
        if 0 in mine[1]:
            continue  # no element lies anywhere
        strides = [*zip(mine[1], mine[2], other[2], strict=True)]
        if any(n > 1 and s != t for n, s, t in strides) or len({is_channels_last(*x[1:3]) for x in (mine, other)}) > 1:
            return "its strides are others than its fake's"
        if (mine[3:] != other[3:]) and str(op) not in known.SHARES_UNSTATED:
            return "it shares memory otherwise than its fake" if mine[4] != other[4] else "its offset is another"
    return None
