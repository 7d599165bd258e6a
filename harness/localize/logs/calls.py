"""Operator calls as a rank ran them: operator, place in the step, and the digests of inputs and outputs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from bitproof.harness.errors import RecordingError

READS_OUT = "_local_scalar_dense"
"""The operator of `Tensor.item()`: it passes a number to Python, where it may become an argument of any later call."""


OPAQUE = "opaque"
"""The digest of a tensor without bytes of its own, such as a sparse one."""

KERNELS = "graph "
"""Prefix of the operator of a call that is a whole compiled graph; the graph's name follows."""


CLIPPING = "clipping"
"""The part of an update that clips gradients."""


class CallSite(NamedTuple):
    """The place of a call in a step, such as layers.3.mlp, backward, chunk 1.

    - `module`: its name, "" for the root, None for a call outside modules.
    - `direction`: "forward", "backward", "update" for everything after the gradients, or None if unknown.
    - `chunk`: 0 or 1, or None for a call that runs once.
    """

    module: str | None
    direction: str | None
    chunk: int | None = None


class Call(NamedTuple):
    """An operator call in a log. Tensors are digests, as in records.

    - `inputs`, `outputs`: outputs include tensors written in place. The outputs of a collective are those after its
      wait.
    - `aliases`: other tensors that the call changed, because they share memory with a tensor that it wrote.
    - `view`: whether the call returns a view, and computes nothing.
    - `producers`: for each input, the index of the call that wrote it, None if no call of the step did. If an input was
      written in parts, the writers of the parts follow at the end.
    - `scalars`: name and text of each argument that is a number, string, dtype, or list of these; defaults included.
    - `peers`: the ranks of a collective's group, or the sender and receiver of a message; empty for other calls.
    - `micro_batch`: counts from 1, if a step calls its model more than once.
    - `part`: in an update, the optimizer, "clipping" or "loss scaling". In a mixture of experts, "dispatch", "compute"
      or "combine". None if unknown.
    - `draws`: whether the call is random. If so, its last input and output are states of the generator.
    - `node`, `source`: the graph's node and the user's line, None if unknown.
    - `unwritten`: positions of inputs that are uninitialized memory.
    - `outside`: positions of inputs that were written outside torch's operators, such as by NumPy.
    - `tag`: the tag of a message, which its send and its receive share; "" for other calls. Two systems may choose
      different tags, so it is no scalar.
    """

    place: CallSite
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
    unwritten: tuple[int, ...] = ()
    outside: tuple[int, ...] = ()
    tag: str = ""

    def __str__(self) -> str:
        module = self.place.module if self.place.module else "the step itself"
        chunk = "" if self.place.chunk is None else f", chunk {self.place.chunk}"
        micro_batch = "" if self.micro_batch is None else f", micro-batch {self.micro_batch}"
        part = "" if self.part is None else f", {self.part}"
        direction = self.place.direction or "direction not known"
        return f"{self.operator} of {module} ({direction}{chunk}{micro_batch}{part})"


def is_abandoned(call: Call) -> bool:
    """Whether a call is a collective that was never waited for. False for a send, as it has no result to wait for."""
    return call.collective and bool(call.inputs) and not call.outputs and not call.operator.startswith("send")


def returns_only_inputs(call: Call) -> bool:
    """Whether each output of a call equals one of its inputs, as for a product with 1. False without outputs."""
    # The first output is compared before sets are built: this runs for every call of a log.
    outputs, inputs = call.outputs, call.inputs
    return bool(outputs) and outputs[0] in inputs and (len(outputs) == 1 or set(outputs) <= set(inputs))


def producer_of(
    calls: Sequence[Call], given: Callable[[int], Sequence[int | None]], index: int, position: int
) -> int | None:
    """Return the index of the call that computed an input; None if none of `calls` did.

    The input is at `position` of the call at `index`. Views are followed back. `given` takes the index of a call and
    returns the producers of its inputs.
    """
    while True:
        # A view computes nothing, so go on to its tensor, which is its first input. But a view of a value from before
        # the step has no producer to go on to: then the view itself is the answer.
        made_by = given(index)[position]
        if made_by is None:
            return None
        if not calls[made_by].view or not any(producer is not None for producer in given(made_by)):
            return made_by
        index, position = made_by, 0


def calls_to_text(calls: Iterable[Call]) -> str:
    """Return a log as JSON lines."""
    return "".join(json.dumps(call) + "\n" for call in calls)


def calls_from_text(text: str, where: str) -> list[Call]:
    """Return the calls of a log that `calls_to_text` wrote.

    Raises RecordingError, which names `where`, if the text is damaged.
    """
    try:
        return [_call(json.loads(line)) for line in text.splitlines()]
    except (ValueError, TypeError, RecursionError) as error:
        raise RecordingError("a log of operator calls is damaged", found=str(error), where=where) from error


def _call(values: list[Any]) -> Call:
    place, operator, inputs, outputs, *more = values
    # JSON has lists for tuples. `scalars` is a tuple of pairs, so its entries are converted as well.
    others: list[Any] = [tuple(each) if isinstance(each, list) else each for each in more]
    call = Call(CallSite(*place), operator, tuple(inputs), tuple(outputs), *others)
    scalars = tuple((str(name), str(value)) for name, value in call.scalars)
    return call._replace(scalars=scalars) if scalars else call
