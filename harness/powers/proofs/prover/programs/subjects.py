"""`bitproof.prove(f, g)`: do two functions, modules, graphs or exported programs compute equal bits for every input?

    found = bitproof.prove(f, g, x)
    assert found.verdict == "PROVED", found
    found.answers            for each output: verdict, reason or first differing calls, witness

Parameters and buffers of the two programs are paired by name, inputs and outputs by position. A proof holds for all
values of inputs, parameters and buffers with these shapes.
"""

from __future__ import annotations

import traceback
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bitproof.harness.graph.in_one_process import NotEvaluatedError
from bitproof.harness.powers.proofs.prover.answers import BUFFER, PARAMETER, REFUSED
from bitproof.harness.powers.proofs.prover.evaluate import same_bits
from bitproof.harness.powers.proofs.prover.graphs.export import RefusedError
from bitproof.harness.powers.proofs.prover.induction import induction
from bitproof.harness.powers.proofs.prover.layouts import line_of
from bitproof.harness.powers.proofs.prover.pairs import MOST_ELEMENTS, PairProof, Values, prove_programs, refusal_text
from bitproof.harness.powers.proofs.prover.programs.compared_run import check_run, fill, not_run
from bitproof.harness.powers.proofs.prover.programs.optimizers import OPTIMIZER
from bitproof.harness.powers.proofs.prover.programs.provable import ConvertedProgram, convert
from bitproof.harness.powers.proofs.prover.programs.reachable import GRADIENT, has_values, valued
from bitproof.harness.powers.proofs.prover.programs.side_effects import of_file
from bitproof.harness.powers.proofs.prover.proof_data import WRITTEN, Graph
from bitproof.harness.torch_compat import has_open_sizes
from bitproof.harness.torch_operators import storage_key

NUM_SETS = 2
"""The number of sets of random inputs on which both programs are computed, in addition to the given inputs."""


def prove_equal(f: Any, g: Any, *inputs: Any, dynamic_shapes: Any = None) -> PairProof:
    """Prove that `f` and `g` compute equal bits. The result has an answer for each output.

    - `f`, `g`: functions or modules that take `inputs`, graph modules, or exported programs, which have their own
      inputs.
    - `inputs`: may be nested tuples, lists and dictionaries. Tensors, modules and optimizers in them are inputs of the
      proof. Any other object becomes part of the program.
    - `dynamic_shapes`: as in `torch.export.export`. Both programs are exported with these sizes as symbols.

    The answer for an unproved output has the reason, or how the two programs were seen to differ. No error is raised if
    a proof is impossible: the verdict is REFUSED, with the node and the reason.
    """
    try:
        if (drawn := _with_values(f, g, inputs) if dynamic_shapes is None else None) is not None:
            return drawn
        return _proved(convert(f, inputs, dynamic_shapes), convert(g, inputs, dynamic_shapes))
    except RefusedError as error:
        return PairProof(REFUSED, reason=refusal_text(error))
    # The arguments are a user's objects, which may do anything. A proof that fails must not end the user's program.
    except Exception as error:
        return PairProof(REFUSED, reason=_unforeseen(error))


def _with_values(f: Any, g: Any, inputs: Sequence[Any]) -> PairProof | None:
    """Prove two programs whose tensors have no values, such as tensors on the meta device, by drawing values.

    Returns None if all tensors have values, if the drawn values would be too large, or if tracing fails.
    """
    try:
        world = valued({"f": f, "g": g, "inputs": tuple(inputs)})
        sides = [convert(world[x], world["inputs"]) for x in ("f", "g")] if world else []
    except RefusedError:
        return None
    for side in sides:
        for name, x in side.values.items():
            # Seeded by name, so that a parameter has the same values in both programs, whatever its position.
            fill({name: x}, {name: random({name: x}, {}, zlib.crc32(name.encode()))[0]})
    return _proved(*sides) if sides else None


def _proved(one: ConvertedProgram, other: ConvertedProgram) -> PairProof:
    try:
        _check_state(one, other)
        _check_keys(one, other)
        _check_effects(one, other)
        return prove_converted(one, other)
    except RefusedError as error:
        return PairProof(REFUSED, reason=refusal_text(error))


def _unforeseen(error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    what = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no reason given'}"
    where = f"{Path(frames[-1].filename).name}, line {frames[-1].lineno}" if frames else "an unknown line"
    return f"it could not be proved, for a reason that bitproof does not know: {what} ({where}); please report it"


def prove_converted(one: ConvertedProgram, other: ConvertedProgram) -> PairProof:
    """Prove two programs equal, and compute their graphs on the programs' own inputs and on random inputs.

    Unless the graphs are refused as a whole, the programs themselves are run as well, and compared with their graphs.
    """
    found = prove_programs(one.program, other.program, lambda: _sets(one), must_read=())
    if found.proof is None or found.graphs is None:
        return found
    if reason := _misplaced({**other.values, **one.values}, found.graphs):
        return _refused(found, reason)
    sides = one.single_step_reason, other.single_step_reason
    found = replace(found, induction=induction(found.proof, found.graphs, found.verdict, sides))
    return refuse_unlike_runs(found, one, other)


def refuse_unlike_runs(found: PairProof, one: ConvertedProgram, other: ConvertedProgram) -> PairProof:
    """Run both programs, and return their proof `found` with changes:

    - It becomes REFUSED if a program does not do the same as its graph.
    - It gets the reason in `not_run` if a program cannot be run.
    """
    if not_runnable := not_run(one) or not_run(other):
        return replace(found, not_run=not_runnable)
    like = dict(zip(one.program.names, one.program.inputs, strict=True))
    drawn = [random(like, one.values, seed) for seed in (range(NUM_SETS) if _all_closed(like) else ())]
    # Only a second step shows whether the first left something that the next one reads.
    next_is_claimed = found.induction is not None and found.induction.holds
    for who, side in (("reference", one), ("candidate", other)):
        if side.subject is None:
            continue  # an exported program is its graph
        try:
            check_run(side, num_steps=2 if next_is_claimed else 1)
            for values in drawn:
                check_run(side, dict(zip(like, values, strict=True)))
        except NotEvaluatedError as error:
            found = replace(found, not_run=f"{error} is not computed here")
        except RefusedError as error:
            return _refused(found, f"of the {who}, {refusal_text(error)}")
    return found


def _refused(found: PairProof, reason: str) -> PairProof:
    return replace(found, verdict=REFUSED, proof=None, graphs=None, reason=reason)


def _check_keys(one: ConvertedProgram, other: ConvertedProgram) -> None:
    # Outputs are paired by position, which pairs different entries of dictionaries with other keys or in another order.
    for place, (x, y) in enumerate(zip(one.keys or (), other.keys or (), strict=False)):
        if x and y and x != y:
            names = ["".join(keys) for keys in (x, y)]
            what = f"output {place} is returned as {names[0]} by the reference and as {names[1]} by the candidate"
            raise RefusedError(what, where="the outputs")


def _check_effects(one: ConvertedProgram, other: ConvertedProgram) -> None:
    lefts = [
        dict.fromkeys([*(x for x in side.program.outputs if _is_left(x, side)), *side.effects]) for side in (one, other)
    ]
    # Writes to inputs are not compared here, because they are outputs of the proof.
    written = [{x.removeprefix(WRITTEN) for x in side.program.names} for side in (one, other)]
    for place in dict.fromkeys([*lefts[0], *lefts[1]]):
        name = place.removeprefix(WRITTEN)
        sides = [place in left for left in lefts]
        if sides[0] != sides[1] and name not in written[0] | written[1]:
            who, fix = ("reference" if sides[0] else "candidate"), ""
            if name.startswith(GRADIENT):
                fix = ": end both by zero_grad(), or leave it in both"
            raise RefusedError(f"only the {who} leaves something as {name}{fix}", where="what a call leaves")
        if one.effects.get(place) != other.effects.get(place):
            after = [side.effects.get(place) for side in (one, other)]
            what = f"{name} is {after[0]} after the reference and {after[1]} after the candidate"
            raise RefusedError(what, where="what a call leaves")


def _is_left(name: str, side: ConvertedProgram) -> bool:
    return name.startswith(WRITTEN) and name.removeprefix(WRITTEN) not in side.program.names


def _check_state(one: ConvertedProgram, other: ConvertedProgram) -> None:
    for name in one.values.keys() & other.values.keys():
        x, y = one.values[name], other.values[name]
        is_kept = name.startswith((PARAMETER, BUFFER, GRADIENT)) and has_values(x) and has_values(y) and x is not y
        if is_kept and not same_bits(x.detach(), y.detach()):
            what = f"{name} holds other bits on the two sides: load one side's state into the other"
            raise RefusedError(what, where="both")


def _misplaced(values: Mapping[str, Any], graphs: Sequence[Graph]) -> str | None:
    """Return why a proof does not hold for inputs at these addresses in memory; None if it does.

    - An input must be aligned to `line_of` bytes.
    - Two inputs must not share memory that a program writes. This includes two mappings of the same file.

    Tensors over NumPy arrays may violate both.
    """
    # By input: an identity of its memory, and the addresses at which that begins and ends.
    spans: dict[str, tuple[object, int, int]] = {}
    for name, x in values.items():
        if not isinstance(x, Tensor) or x.layout != torch.strided or has_open_sizes(x):
            continue
        memory, is_real = x.untyped_storage(), has_values(x)
        start = memory.data_ptr() if is_real else 0
        line = line_of(x.device.type)
        if x.numel() and (start + x.storage_offset() * x.itemsize) % line:
            begins = f"{name} begins at element {x.storage_offset()} of its memory, and not at a line of {line} bytes"
            return f"{begins}: pass a copy of it, by clone()"
        where, begin = of_file(start) if x.device.type == "cpu" and is_real else (str(x.device), start)
        spans[name] = where if is_real else storage_key(x), begin, begin + max(memory.nbytes(), 1)
    written = {name for graph in graphs for name in _written_inputs(graph)}
    for place, (name, (where, start, end)) in enumerate(spans.items()):
        for other in [*spans][place + 1 :] if written else ():
            its, begin, stop = spans[other]
            if its == where and begin < end and start < stop and written & {name, other}:
                return f"{name} and {other} share memory that a program writes: pass a copy of one, by clone()"
    return None


def _written_inputs(graph: Graph) -> set[str]:
    memories = {x.storage for call in graph.calls if call.writes for x in call.results}
    inputs = [(call.name, x) for call in graph.calls if call.op == "input" for x in call.results]
    returned = {name.removeprefix(WRITTEN) for name, _ in graph.outputs if name.startswith(WRITTEN)}
    return returned | {name for name, x in inputs if x.storage in memories}


def _sets(one: ConvertedProgram) -> list[Values]:
    like = dict(zip(one.program.names, one.program.inputs, strict=True))
    if sum(map(_span, like.values())) > MOST_ELEMENTS:
        return []
    given = [one.values.get(name) for name in like]
    found: list[Values] = [[given]] if all(has_values(x) or isinstance(x, int) for x in given) else []
    return [*found, *([random(like, one.values, seed)] for seed in range(NUM_SETS))] if _all_closed(like) else found


def _all_closed(like: Mapping[str, Any]) -> bool:
    return all(isinstance(x, Tensor) and _is_closed(x) for x in like.values())


def _span(x: Any) -> int:
    if not isinstance(x, Tensor) or not _is_closed(x) or 0 in x.shape:
        return 0
    # The elements from the first to the last in memory: 9 for shape (2,) and stride (8,).
    return 1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))


def _is_closed(x: Tensor) -> bool:
    return all(isinstance(n, int) for n in (*x.shape, *x.stride()))


def random(like: Mapping[str, Tensor], values: Mapping[str, Any], seed: int) -> Sequence[Any]:
    """Return random inputs with the layouts of `like`, in the order of `like`.

    Integers keep their values from `values`, because they may be indices. Optimizer state keeps its values, because it
    may be a count.
    """
    generator = torch.Generator().manual_seed(seed)
    found = []
    for name, x in like.items():
        is_kept = name.startswith(OPTIMIZER) and has_values(values.get(name))
        if not is_kept and (x.is_floating_point() or x.is_complex()):
            kind = torch.complex64 if x.is_complex() else torch.float32
            value = torch.randn(x.shape, generator=generator, dtype=kind)
            # The second factor spreads the magnitudes far enough to expose a different rounding.
            value = (value * torch.exp(torch.randn(x.shape, generator=generator))).to(x.dtype)
        elif has_values(values.get(name)):
            value = values[name]
        else:
            value = torch.zeros(x.shape, dtype=x.dtype)
        found.append(value)
    return [_laid_out(value, x) for value, x in zip(found, like.values(), strict=True)]


def _laid_out(value: Tensor, like: Tensor) -> Tensor:
    made = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
    # All indices of a dim with stride 0 are one element, and torch refuses to copy into such a tensor.
    distinct = tuple(slice(0, 1) if s == 0 else slice(None) for s in like.stride())
    made[distinct].copy_(value[distinct]) if distinct else made.copy_(value)
    return made
