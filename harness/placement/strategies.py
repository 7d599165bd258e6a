"""List the strategies to shard each operator over ranks on one mesh axis, from DTensor's sharding propagator.

A placement is a text: "R" is replicated, "S0" is sharded evenly along dim 0, "P" is a partial sum on each rank.

Needs:    an operator, and fake tensors for its arguments and results.
Promises: no strategy twice: first full replication, then the others in the propagator's order. An operator without a
          DTensor rule is replicated. The CPU's attention is split by heads, like that of other devices.
Refuses:  nothing. Uneven shards, and reductions other than sums, are left out.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard

from bitproof.harness.torch_compat import tree_leaves, tree_map_only
from bitproof.harness.torch_distributed import sharding_rules

REPLICATED, PARTIAL = "R", "P"
BY_HEADS = "S1"
"""The placement of split attention, whose tensors are (batch, heads, ...)."""

_aten = torch.ops.aten
_ATTENTION = (
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
)


class Strategy(NamedTuple):
    """A way to place an operator's tensors on ranks: if the inputs have the placements `inputs`, the outputs have
    `outputs`.

    For example, a product whose rows are sharded: outputs ("S0",), inputs ("S0", "R").
    """

    outputs: tuple[str, ...]
    inputs: tuple[str, ...]

    @property
    def is_shared(self) -> bool:
        """Whether the ranks share the work: some tensor is sharded or a partial sum."""
        return any(placement != REPLICATED for placement in (*self.outputs, *self.inputs))


def tensors_of(values: Any) -> list[Tensor]:
    return [x for x in tree_leaves(values) if isinstance(x, Tensor)]


def strategies_of(
    operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any, size: int
) -> list[Strategy]:
    """Return an operator's strategies on `size` ranks. `args`, `kwargs` and `result` have fakes of the whole
    tensors."""
    inputs, outputs = tensors_of((args, kwargs)), tensors_of(result)
    whole = Strategy((REPLICATED,) * len(outputs), (REPLICATED,) * len(inputs))
    if operator in _ATTENTION:
        found = [Strategy((BY_HEADS,) * len(outputs), (BY_HEADS,) * len(inputs))]
    elif (single := _rules().propagator.op_single_dim_strategy_funcs.get(operator)) is not None:
        found = _of_one_dim(single, operator, args, kwargs, len(outputs))
    elif (known := _rules().propagator.op_strategy_funcs.get(operator)) is not None:
        found = _followed(known, operator, args, kwargs, inputs, size)
    else:
        found = []
    fitting = (
        strategy
        for strategy in found
        if len(strategy.outputs) == len(outputs)
        and len(strategy.inputs) == len(inputs)
        and _fits(strategy.outputs, outputs, size)
        and _fits(strategy.inputs, inputs, size)
    )
    # The order matters: among equally expensive choices, the solver prefers the first.
    return list(dict.fromkeys([whole, *fitting]))


@functools.cache
def redistribute_cost(shape: tuple[int, ...], dtype: torch.dtype, size: int, before: str, after: str) -> float:
    """Return DTensor's cost, in microseconds, of converting a tensor from placement `before` to `after`; infinite if
    impossible.

    `shape` is the shape of the whole tensor. Unlike in DTensor, a replicated tensor is never converted to partial sums.
    """
    if before == after:
        return 0.0
    # Each rank already has the part that it keeps, so nothing is sent.
    if before == REPLICATED:
        return float("inf") if after == PARTIAL else 0.0
    meta = _rules().TensorMeta(torch.Size(shape), torch.empty(shape, device="meta").stride(), dtype)
    return float(_rules().cost(_spec(meta, before, size), _spec(meta, after, size)))


def is_sharded_evenly(x: Tensor, placement: str, size: int) -> bool:
    # Such a placement does not shard the tensor.
    if placement in (REPLICATED, PARTIAL):
        return True
    dim = int(placement[1:])
    return dim < x.dim() and x.shape[dim] > 0 and x.shape[dim] % size == 0


@functools.cache
def _rules() -> SimpleNamespace:
    return sharding_rules()


def _fits(placements: Sequence[str], tensors: Sequence[Tensor], size: int) -> bool:
    return all(p != "?" and is_sharded_evenly(x, p, size) for p, x in zip(placements, tensors, strict=True))


def _meta(x: Tensor) -> Any:
    return _rules().TensorMeta(x.shape, x.stride(), x.dtype)


def _spec(meta: Any, placement: str, size: int) -> Any:
    made = {REPLICATED: Replicate(), PARTIAL: Partial()}.get(placement) or Shard(int(placement[1:]))
    return _rules().DTensorSpec(_rules().line(size), (made,), tensor_meta=meta)


def _placement_text(placement: Any) -> str:
    """Return the text of a placement, or of torch's placeholder for a shard; "?" for an unsupported placement."""
    if type(placement) is Replicate:
        return REPLICATED
    if type(placement) is Partial:
        return PARTIAL if placement.reduce_op == "sum" else "?"
    # torch's placeholder is a private class, so it is recognized by its name.
    is_shard = type(placement) is Shard or type(placement).__name__ == "_ShardingPlaceholder"
    return f"S{placement.dim}" if is_shard and placement.dim >= 0 else "?"


def _spec_text(spec: Any) -> str:
    return "?" if spec is None else _placement_text(spec.placements[0])


def _of_one_dim(rule: Any, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any], count: int) -> list[Strategy]:
    """Return the strategies that `rule` lists for one mesh axis. `count` is the number of outputs: `rule` lists the
    placements of outputs before those of inputs.
    """
    metas, named = tree_map_only(Tensor, _meta, (tuple(args), kwargs))
    rows = [[_placement_text(placement) for placement in row] for row in rule.func(operator, metas, named)]
    return [Strategy(tuple(row[:count]), tuple(row[count:])) for row in rows]


def _followed(
    rule: Any, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any], inputs: Sequence[Tensor], size: int
) -> list[Strategy]:
    # The rule is called with all inputs replicated, with all sharded along a dim, and with all as partial sums.
    dims = range(max((x.dim() for x in inputs), default=0))
    found = []
    for placement in (REPLICATED, *(f"S{dim}" for dim in dims), PARTIAL):

        def strategy(x: Tensor, placement: str = placement) -> Any:
            # An input that cannot be sharded that way is replicated.
            own = placement if is_sharded_evenly(x, placement, size) else REPLICATED
            return _rules().OpStrategy([_rules().OpSpec(_spec(_meta(x), own, size))])

        def wrapped(value: Any, strategy: Any = strategy) -> Any:
            if isinstance(value, (list, tuple)) and value and all(isinstance(x, Tensor) for x in value):
                return _rules().TupleStrategy([strategy(x) for x in value])
            return tree_map_only(Tensor, strategy, value)

        info = _rules().propagator.op_to_schema_info.get(operator)
        schema = _rules().OpSchema(
            operator, tuple(map(wrapped, args)), {k: wrapped(v) for k, v in kwargs.items()}, info
        )
        try:
            answer = rule(schema)
        except (AssertionError, LookupError, NotImplementedError, RuntimeError, ValueError):
            # The rule does not support this placement.
            continue
        found += _strategies(answer)
    return found


def _strategies(answer: Any) -> list[Strategy]:
    """Convert the answer of a DTensor rule to strategies.

    An answer for several outputs may have a separate list of strategies for each output.
    """
    if isinstance(answer, _rules().TupleStrategy):
        rows = list(zip(*(child.strategies for child in answer.children), strict=True))
        return [
            Strategy(tuple(_spec_text(s.output_specs) for s in row), tuple(map(_spec_text, row[0].input_specs or ())))
            for row in rows
        ]
    found = []
    for spec in answer.strategies:
        outputs = spec.output_specs if isinstance(spec.output_specs, tuple) else (spec.output_specs,)
        # Without specs of inputs, a rule means those of the outputs.
        inputs = outputs if spec.input_specs is None else spec.input_specs
        found.append(Strategy(tuple(map(_spec_text, outputs)), tuple(map(_spec_text, inputs))))
    return found
