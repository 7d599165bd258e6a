"""Runs a program's calls for all ranks in a single process, each call on all ranks before the next.

A collective reads the values of all ranks of its group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from bitproof.harness.errors import PassError
from bitproof.harness.graph.in_one_process import NotEvaluatedError, collective
from bitproof.harness.powers.sensitivity.perturb import copied, tensors_of
from bitproof.harness.powers.sensitivity.program import Program, ReplayedCall, Source, filled
from bitproof.harness.torch_operators import storage_key

Get = Callable[[int], Any]
"""Returns a rank's value by its number (slot)."""

Ranks = Sequence[Sequence[Any]]
"""All values of a step: `ranks[rank][slot]`; a slot is the number of a value."""


def run_call(call: ReplayedCall, get: Get) -> list[tuple[int, Any]]:
    """Run a call other than a collective. Return (value number, new value) for its result and each written argument.

    `get` returns a value by its number. Values are not modified: the call writes to copies.
    """
    if call.is_wait:
        # In one process a collective has ended when it returns, so a wait returns its argument.
        return [(call.result, get(call.args[0].number))]
    if not call.writes:
        return [(call.result, call.function(*filled(call.args, get), **_keyword_arguments(call, get)))]
    # The call writes copies: other calls still read the old values.
    written = {old: copied(get(old)) for old, _ in call.writes}

    def read(slot: int) -> Any:
        return written[slot] if slot in written else get(slot)

    result = call.function(*filled(call.args, read), **_keyword_arguments(call, read))
    return [(call.result, result), *((new, written[old]) for old, new in call.writes)]


def _keyword_arguments(call: ReplayedCall, get: Get) -> Mapping[str, Any]:
    return {name: filled(value, get) for name, value in call.kwargs.items()}


def run_collective(call: ReplayedCall, group: Sequence[int], gets: Sequence[Get]) -> list[Any]:
    """Return the result of a collective on each rank of `group`, in the group's order.

    `gets` has a function for each rank, which takes the number of a value and returns the value. Raises RuntimeError if
    the ranks' sizes or dtypes do not match.
    """
    arguments: list[Any] = [() for _ in gets]
    for rank in group:
        # The last argument is the group's name.
        arguments[rank] = filled(call.args, gets[rank])[:-1]
    if call.operator == "all_to_all_single":
        for place, rank in enumerate(group):
            # Arguments are (input, output sizes, input sizes): each sender's size for this rank must be the expected
            # one.
            sent = [int(arguments[peer][2][place]) for peer in group]
            if sent != [int(size) for size in arguments[rank][1]]:
                raise RuntimeError(f"rank {rank} expects {arguments[rank][1]} rows and is sent {sent}")
    elif len({(tuple(arguments[rank][0].shape), arguments[rank][0].dtype) for rank in group}) > 1:
        raise RuntimeError("ranks hand a collective tensors of several shapes")
    found = collective(f"{call.operator_namespace}.{call.operator}", (tuple(group),), arguments)
    return [found[rank] for rank in group]


@torch.no_grad()
def run_step(program: Program, before: Sequence[dict[Source, Tensor]]) -> list[list[Any]]:
    """Run a step for all ranks, and return its values as `[rank][value number]`.

    `before` has each rank's values before the step. Raises PassError if the step's calls cannot be repeated one by one.
    """
    ranks: list[list[Any]] = [[None] * program.num_slots for _ in before]
    for values, own in zip(ranks, before, strict=True):
        # The state before the step, and its batch.
        for source, slot in program.inputs.items():
            values[slot] = own[source]
    gets = [values.__getitem__ for values in ranks]
    for call in program.calls:
        if call.partition is None:
            for values, get in zip(ranks, gets, strict=True):
                for slot, value in run_call(call, get):
                    values[slot] = value
            continue
        try:
            for group in call.partition:
                for rank, value in zip(group, run_collective(call, group, gets), strict=True):
                    ranks[rank][call.result] = value
        except NotEvaluatedError as error:
            raise PassError(f"a collective cannot be carried in one process: {error}") from error
    # All ranks run the same program, so rank 0 shows which slots share memory.
    _refuse_written_views(program, ranks[0])
    return ranks


def _refuse_written_views(program: Program, values: Sequence[Any]) -> None:
    # For each storage, the slots whose values are in it.
    sharing: dict[int, list[int]] = {}
    for slot, value in enumerate(values):
        for x in tensors_of(value):
            sharing.setdefault(storage_key(x), []).append(slot)
    for call in program.calls:
        for old, _ in call.writes:
            for x in tensors_of(values[old]):
                for other in sharing[storage_key(x)]:
                    # A view that is read only before the write is no problem.
                    late = [index for index in program.readers[other] if index > call.index]
                    if other != old and late:
                        raise PassError(
                            "memory is overwritten that an earlier view reads later: no single call can be repeated",
                            found=f"{call.operator} {call.node}, then {program.calls[late[0]].operator}",
                        )


def after(program: Program, values: Sequence[Any]) -> dict[Source, Tensor]:
    return {source: values[slot] for source, slot in program.last.items()}
