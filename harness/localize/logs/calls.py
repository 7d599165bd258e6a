"""Operator calls as a rank ran them: what was called, where in the model, and the digests of what went in and out."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from bitproof.harness.errors import RecordingError

READS_OUT = "_local_scalar_dense"
"""What hands a tensor's number to Python, where it may become an argument of any later call."""


KERNELS = "graph "
"""Prefix of the operator of a call that is a whole compiled graph; the graph's name follows."""


class Place(NamedTuple):
    """Where in a step a call belongs. Passes may move a call, but not to another place.

    `direction` is "forward", "backward", or "update" for what follows the gradients, None where it is unknown;
    `module` is a fully qualified name, "" for the root, None for what no module owns; `chunk` is 0, 1, or None for
    what runs once.
    """

    module: str | None
    direction: str | None
    chunk: int | None = None


class Call(NamedTuple):
    """One operator call. Digests are those of records: over dtype, shape and every byte in order.

    `outputs` are taken after the call, and, of a collective, after its wait; what is written in place counts.
    `aliases` are the other tensors over a storage that the call wrote, as they are after it, where it changed them. A
    `view` computes nothing.
    `producers` has, for each input, the index of the logged call that left it in its memory: two tensors of one value
    have histories of their own. None, or nothing, where that is not known. After these, the calls that left parts of an
    input that none left whole.
    `scalars` are the arguments that are numbers, words, dtypes or lists of these, by name, left-out ones as defaults.
    `peers` are the ranks that take part in a collective, in their group's order, and of what is sent the sender and the
    receiver; nothing where that is not known.
    `micro_batch` counts from 1 where a step calls its model more than once.
    `part` is what of an update runs, where that is known: an optimizer, "clipping", "loss scaling"; and of a mixture of
    experts "dispatch", "compute" or "combine", where the model says it.
    `draws`: its last input and its last output are states of the generator that it drew from.
    `node` and `source` name the graph's node and the user's line, where known.
    """

    place: Place
    operator: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    node: str | None = None
    source: str | None = None
    collective: bool = False
    aliases: tuple[str, ...] = ()
    view: bool = False
    producers: tuple[int | None, ...] = ()
    scalars: tuple[tuple[str, str], ...] = ()
    peers: tuple[int, ...] = ()
    micro_batch: int | None = None
    draws: bool = False
    part: str | None = None

    def __str__(self) -> str:
        module = self.place.module if self.place.module else "the step itself"
        chunk = "" if self.place.chunk is None else f", chunk {self.place.chunk}"
        micro_batch = "" if self.micro_batch is None else f", micro-batch {self.micro_batch}"
        part = "" if self.part is None else f", {self.part}"
        direction = self.place.direction or "direction not known"
        return f"{self.operator} of {module} ({direction}{chunk}{micro_batch}{part})"


def is_abandoned(call: Call) -> bool:
    """Whether a call is a collective whose result was not waited for; what is sent has none here."""
    return call.collective and bool(call.inputs) and not call.outputs and not call.operator.startswith("send")


def gives_what_it_reads(call: Call) -> bool:
    """Whether all that a call gives are values that it reads, as of a product with 1."""
    outputs, inputs = call.outputs, call.inputs
    return bool(outputs) and outputs[0] in inputs and (len(outputs) == 1 or set(outputs) <= set(inputs))


def maker_of(
    calls: Sequence[Call], given: Callable[[int], Sequence[int | None]], index: int, position: int
) -> int | None:
    """Which call computed an input of a call, views passed over; None for what none of these calls made.

    `given` has the calls that gave a call's inputs.
    """
    while True:
        made_by = given(index)[position]
        if made_by is None:
            return None
        if not calls[made_by].view or not any(giver is not None for giver in given(made_by)):
            return made_by
        index, position = made_by, 0


def calls_to_text(calls: Iterable[Call]) -> str:
    """A log as JSON lines."""
    return "".join(json.dumps(call) + "\n" for call in calls)


def calls_from_text(text: str, where: str) -> list[Call]:
    """The inverse of `calls_to_text`. Raises RecordingError, naming `where`, when the text is damaged."""
    try:
        return [_call(json.loads(line)) for line in text.splitlines()]
    except (ValueError, TypeError, RecursionError) as error:
        raise RecordingError("a log of operator calls is damaged", found=str(error), where=where) from error


def _call(values: list[Any]) -> Call:
    place, operator, inputs, outputs, *told = values
    others: list[Any] = [tuple(each) if isinstance(each, list) else each for each in told]
    call = Call(Place(*place), operator, tuple(inputs), tuple(outputs), *others)
    scalars = tuple((str(name), str(value)) for name, value in call.scalars)
    return call._replace(scalars=scalars) if scalars else call
