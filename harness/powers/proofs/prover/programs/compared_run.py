"""Runs a program, and compares the run with the program's graph.

A proof is about a graph. It does not show that the graph does the same as the program, so this is tested. Program and
graph run on copies of the same inputs, from the same state of the random generators. Afterwards these must agree:

1. the returned values, and the bits of every input;
2. all changes of objects: gradients, attributes, containers, optimizer state;
3. the random generators and the switches of the process.

A difference may come from a hook, or from a fast path that tracing turns off.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bitproof.harness.machine.determinism import Switches
from bitproof.harness.powers.proofs.prover.evaluate import FailsError, run_graph, same_bits, with_layout
from bitproof.harness.powers.proofs.prover.graphs.export import RefusedError
from bitproof.harness.powers.proofs.prover.pairs import filling_memory, same_value, witness_of
from bitproof.harness.powers.proofs.prover.programs.provable import (
    OUTPUT,
    WRITTEN,
    ConvertedProgram,
    roots_of,
    why_not_run,
)
from bitproof.harness.powers.proofs.prover.programs.reachable import (
    Around,
    Memories,
    Reached,
    changed,
    copied,
    is_users_file,
    plain_token,
)
from bitproof.harness.powers.proofs.prover.programs.side_effects import refusing_side_effects
from bitproof.harness.torch_compat import flattened

SEED = 0x5EED_0FB1_7500_F00D
"""The seed of the random generators before a run.

It is unusual: if a program sets a seed itself, it ends in another generator state than its graph.
"""


def not_run(converted: ConvertedProgram) -> str | None:
    """Return why a program cannot be run, such as missing values. None if it can, or if it is only a graph."""
    if converted.subject is None:
        return None
    return why_not_run(converted.values)


def check_run(converted: ConvertedProgram, drawn: Mapping[str, Any] | None = None, *, num_steps: int = 1) -> None:
    """Run a program and its graph for some steps. Raises RefusedError if the two runs differ.

    - `drawn`: random inputs by name, instead of the program's own. If program and graph both fail on these, no error is
      raised.
    - `num_steps`: the number of steps.

    Raises NotEvaluatedError if the graph cannot be computed.
    """
    before = Switches.now()
    try:
        unlike, outputs = _difference(converted, drawn, num_steps)
        if unlike is not None:
            # Uninitialized memory may hold anything, such as values of an earlier run, and explain the difference. So
            # both run again with such memory filled. If that changes outputs, the second comparison counts.
            with filling_memory():
                again, filled = _difference(converted, drawn, num_steps)
            reads_old_memory = not all(map(same_value, outputs, filled))
            unlike = again if reads_old_memory else unlike
    finally:
        before.restore()
    if unlike is not None:
        raise RefusedError(f"the graph is not what the program does: {unlike}", where=converted.called)


@dataclass
class _Call:
    """The results of a run: outputs by name, changes by path, and the state of the random generator afterwards."""

    outputs: dict[str, Any]
    changes: dict[str, Any]
    generator: Tensor


def _difference(
    converted: ConvertedProgram, drawn: Mapping[str, Any] | None, num_steps: int
) -> tuple[str | None, list[Any]]:
    """Run a program and its graph. Returns a pair:

    - the first difference in words; None if there is none;
    - all computed outputs and final values of inputs, so that two runs can be compared.

    `drawn` has input values by name.
    """
    memories = Memories()
    world = copied({"subject": converted.subject, "inputs": tuple(converted.inputs)}, memories)
    named = {name: memories.made[id(x)] for name, x in converted.values.items() if isinstance(x, Tensor)}
    if drawn is not None:
        fill(named, drawn)
    originals = {name: x for name, x in converted.values.items() if isinstance(x, Tensor)}
    kept = {name: x.detach().clone() for name, x in originals.items()}
    # The program runs on copies, the graph on the values that the copies have before the step.
    runs = _Real(world, named)
    found: list[Any] = []
    # Once for all steps, since a further step begins with the state that the step before left.
    torch.manual_seed(SEED)
    for _ in range(num_steps):
        given = [_value_now(runs.now(name), value) for name, value in _all_inputs(converted)]
        # The graph must start with the state with which the program starts.
        begins = torch.get_rng_state()
        try:
            real = runs.step()
        except FailsError:
            if drawn is not None and _graph_fails(converted, given):
                return None, found  # e.g. a loss that only accepts numbers between 0 and 1
            raise
        torch.set_rng_state(begins)
        # The traced operators already include the casts of the caller's autocast.
        with ExitStack() as stack:
            for device in ("cpu", "cuda"):
                stack.enter_context(torch.autocast(device, enabled=False))
            assert converted.program.module is not None, "what is run has a graph"
            returned, after = run_graph(converted.program.module, [given], converted.program.groups.partitions())
        outputs = {
            name: x for name, x in zip(converted.program.outputs, (own[0] for own in _by_output(returned)), strict=True)
        }
        memory = dict(zip(converted.program.names, after[0], strict=True))
        found += [*outputs.values(), *memory.values(), *real.outputs.values()]
        # The graph started with the same generator state, so it must end with the same.
        if unlike := _unlike(converted, real, outputs, memory, torch.get_rng_state(), runs):
            return unlike, found
        # A further step begins with the state that the program left.
        torch.set_rng_state(real.generator)
    # For example, a global list may refer to the caller's own tensors.
    if touched := next((name for name, x in originals.items() if not same_bits(x.detach(), kept[name])), None):
        return f"run on copies, it changes {touched} itself", found
    return None, found


def _graph_fails(converted: ConvertedProgram, given: Sequence[Any]) -> bool:
    assert converted.program.module is not None, "what is run has a graph"
    try:
        run_graph(converted.program.module, [given], converted.program.groups.partitions())
    except FailsError:
        return True
    return False


def _by_output(returned: Sequence[Sequence[Any]]) -> Sequence[Sequence[Any]]:
    return [*zip(*returned, strict=True)]


def _all_inputs(converted: ConvertedProgram) -> Iterator[tuple[str, Any]]:
    yield from ((name, converted.values.get(name)) for name in converted.program.names)


def _value_now(x: Tensor | None, value: Any) -> Any:
    return value if x is None else with_layout(x.detach(), x.shape, x.stride(), 0)


def fill(named: Mapping[str, Tensor], drawn: Mapping[str, Any]) -> None:
    """Copy each value in `drawn` into the tensor of the same name."""
    with torch.no_grad():
        for name, x in named.items():
            if isinstance(value := drawn.get(name), Tensor):
                # All indices of a dim with stride 0 are one element, and torch refuses to copy into such a tensor.
                place = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in x.stride())
                x.detach()[place].copy_(value[place]) if place else x.detach().copy_(value)


class _Real:
    """A copy of a program and its inputs, which runs step by step.

    - `world`: the copies of the program and its inputs.
    - `named`: the copies of the input tensors by name.
    """

    def __init__(self, world: dict[str, Any], named: Mapping[str, Tensor]) -> None:
        self._subject, self._inputs = world["subject"], world["inputs"]
        self.named = named
        self._known = {id(x): name for name, x in [*named.items()][::-1]}
        self._last = self._reached()

    def _reached(self, **more: Any) -> Reached:
        return Reached(roots_of(self._subject, self._inputs) | more, self._known)

    def now(self, name: str) -> Tensor | None:
        """Return the tensor that is currently the input `name`, since a step may replace the original tensor."""
        return self._last.tensors.get(name, self.named.get(name))

    def step(self) -> _Call:
        switches, surroundings = Switches.now(), Around(self._last)
        try:
            with refusing_side_effects(is_users_file):
                result = self._subject(*self._inputs)
        except RefusedError:
            raise
        except Exception as error:
            reason = str(error).splitlines()[0] if str(error) else ""
            raise FailsError(f"it fails when it really runs: {type(error).__name__}: {reason}", where="it") from error
        generator = torch.get_rng_state()
        # torch's generator is exempt: its state is compared with the graph's afterwards.
        switched = [x for x in switches.changes() if x != "the state of torch's random number generator"]
        if switched:
            raise RefusedError(f"it changes what holds for the whole process: {'; '.join(switched)}", where="it")
        surroundings.refuse_changes()
        outputs = {f"{OUTPUT}{i}": x for i, x in enumerate(flattened(result)[0])}
        self._refuse_attributes(outputs)
        after = self._reached(returned=result)
        changes = changed(self._last, after, without="returned")
        self._last = after
        return _Call(outputs, changes, generator)

    def _refuse_attributes(self, outputs: Mapping[str, Any]) -> None:
        for name, x in outputs.items():
            if not isinstance(x, Tensor) or id(x) in self._known:
                continue
            # An attribute such as `y.aux` is not an output, so nothing would compare it.
            carried = [*vars(x), *(["grad"] if x.is_leaf and x.grad is not None else [])]
            if carried:
                what = f"{name} carries {carried[0]}, which is compared with nothing: return it as an output"
                raise RefusedError(what, where="the outputs")


def _unlike(
    converted: ConvertedProgram,
    real: _Call,
    outputs: Mapping[str, Any],
    memory: Mapping[str, Any],
    generator: Tensor,
    runs: _Real,
) -> str | None:
    """Return the first difference between the runs of a program and of its graph, in words; None if there is none.

    - `real`: the result of the program's run.
    - `runs`: the copy of the program that ran.
    - `outputs`: the graph's outputs, by name.
    - `memory`: the final values of the graph's inputs, by name.
    - `generator`: the state of the random generator after the graph's run.
    """
    # Returned values: the same number, equal numbers and texts, and then equal tensors.
    stated = {name for name, _ in converted.program.others} | {*outputs}
    returned = {name for name in stated if name.startswith(OUTPUT)}
    if returned != {*real.outputs}:
        return f"it returns {len(real.outputs)} values, and its graph {len(returned)}"
    for name, text in converted.program.others:
        if plain_token(real.outputs[name]) is None or repr(real.outputs[name]) != text:
            return f"{name} is {real.outputs[name]!r}, and in its graph {text}"
    written = {f"{WRITTEN}{place}": x for place, x in real.changes.items() if isinstance(x, Tensor)}
    for name in [*outputs, *(x for x in written if x not in outputs)]:
        if name not in outputs:
            return f"it leaves a tensor as {name.removeprefix(WRITTEN)}, and its graph does not"
        x = {**real.outputs, **written}.get(name, runs.named.get(name.removeprefix(WRITTEN)))
        x = x.detach() if isinstance(x, Tensor) else x
        if not same_value(x, outputs[name]):
            return f"{name} has other bits: {witness_of(x, outputs[name])} in its graph"
    # Inputs that no output represents must have the same bits on both sides, too.
    for name, x in runs.named.items():
        if name in memory and f"{WRITTEN}{name}" not in outputs and not same_value(x.detach(), memory[name]):
            return f"{name} is left with other bits: {witness_of(x.detach(), memory[name])} in its graph"
    # Changes of anything else, such as a counter, must be those seen while tracing.
    for place in dict.fromkeys([*real.changes, *converted.effects]):
        x = real.changes.get(place)
        if not isinstance(x, Tensor) and (place not in converted.effects or converted.effects[place] != x):
            return (
                f"it changes {place} to {x}, and its trace "
                f"{'does not' if place not in converted.effects else 'otherwise'}"
            )
    if not torch.equal(generator, real.generator):
        return "it leaves the random generator in another state: does it set a seed?"
    return None
