"""An entry of the fault catalogue: a deliberate defect, or a rewrite that keeps every bit. Imports no torch.

An entry is a function with the decorator `@row`. The entry's name is the function's name with hyphens, such as
`chunk-0-joined-twice`. The first line of the function's docstring describes the defect. There are four kinds of
entries:

    edit     changes the candidate's finished graph before ranks are forked, as a wrong pass would
    call     replaces calls of some operators, in every system that is not compiled
    order    adds the ranks' values in another order, like the fault `sum-order`
    runner   changes how a step with micro-batches or a built-in loop runs, such as the order of micro-batches
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, cast

from bitproof.harness.case import JOINT, PREPARED, Case, Kind
from bitproof.harness.disturb.kinds import Fault

# Both modules import torch, which this module must not.
if TYPE_CHECKING:
    from bitproof.harness.disturb.graph_editor import GraphEditor
    from bitproof.harness.disturb.tamper import TamperedCall

Family = Literal[
    "chunking",
    "gradients",
    "moe",
    "collectives",
    "numerics",
    "memory",
    "fsdp",
    "optimizer",
    "hygiene",
    "ranks",
    "tensor",
    "micro_batches",
    "loops",
    "equivalent",
]

ANY = "*"
"""In a field of `Site`: matches every value."""


class Site(NamedTuple):
    """The place of an operator call in a model, as reports name a call.

    - `module`: the module's name; "" for the root module, None outside any module.
    - `direction`: "forward", "backward" or "update".
    - `chunk`: the index of the chunk; None outside chunks.
    - `operator`: the name without overload, such as `mm`.

    `ANY` in a field matches every value.
    """

    module: str | None
    direction: str | None
    chunk: int | str | None
    operator: str

    def is_at(self, module: str | None, direction: str | None) -> bool:
        return self.module in (ANY, module) and self.direction in (ANY, direction)

    def is_of(self, operator: str) -> bool:
        # The given operator may have an overload: `mm.default`.
        return self.operator in (ANY, operator.partition(".")[0])


class Need(NamedTuple):
    """A condition on cases. `holds` checks it, and `says` states it for errors, such as "a case that chunks"."""

    holds: Callable[[Case], bool]
    says: str


CHUNKED = Need(lambda case: case.chunking is not None, "a case that chunks")
BLOCKS = Need(lambda case: case.chunking is not None and case.chunking.modules == "layers.*", "whole blocks in chunks")
EXPERTS = Need(lambda case: case.model.family != "llama3", "a model with experts")
EXPORTED = Need(lambda case: case.candidate == JOINT, "the candidate joint, whose buffers get new values as copies")
BUCKETS = Need(lambda case: case.pipeline.bucket, "a case that buckets its collectives")
ASYNC_TENSOR = Need(lambda case: case.pipeline.async_tensor, "a case that hides the collectives of tensor ranks")
DENSE_TRAFFIC = Need(lambda case: case.pipeline.dense_traffic, "a case that moves traffic into dense regions")
RECOMPUTES = Need(lambda case: case.memory.policy != "none", "a memory policy that recomputes")
LISTED = Need(lambda case: case.memory.save is not None, "a memory policy with a list of operators to save")
OFFLOADS = Need(lambda case: case.memory.policy == "offload", "the memory policy offload")
SDPA = Need(lambda case: case.model.attention == "sdpa", "attention by SDPA")
PIECES = Need(lambda case: case.model.loss_pieces > 1, "a loss in pieces")
FOLDED = Need(lambda case: case.model.folded, "a folded model")
POSITIONS = Need(
    lambda case: case.batch.data == "adversarial" or case.model.folded, "rows or documents with positions of their own"
)
FLOAT32 = Need(lambda case: case.precision.compute == "float32", "a step computed in float32")
BFLOAT16 = Need(lambda case: case.precision.compute == "bfloat16", "a step computed in bfloat16")


MICRO_BATCHES = Need(
    lambda case: case.schedule is not None and case.candidate == "graph", "a candidate graph that takes micro-batches"
)
PIPELINED = Need(lambda case: case.candidate == "graph" and case.parallelism.pp > 1, "a candidate graph in a pipeline")


def ranks(number: int) -> Need:
    """Return the condition that a case has at least `number` ranks; in a pipeline, that each stage has."""
    return Need(lambda case: case.parallelism.stage_ranks >= number, f"{number} ranks or more")


def steps(number: int) -> Need:
    """Return the condition that a case has at least `number` steps."""
    return Need(lambda case: case.steps >= number, f"{number} steps or more")


ONE_STAGE = Need(lambda case: case.parallelism.pp == 1, "no pipeline, in which a call is not every rank's")
GRAPH = Need(lambda case: case.candidate in PREPARED, "the candidate graph, joint, autoplace or precompiled")
PLAIN = Need(lambda case: not case.pipeline.compiles, "a graph that runs as it is: a backend has compiled others")

Edit = Callable[["GraphEditor"], "list[Site]"]
TamperCall = Callable[["TamperedCall"], Any]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """An entry of the catalogue: a fault, or a rewrite that keeps every bit.

    - `says`: describes the defect in a sentence.
    - `source`: the origin of the defect, such as an issue, or why it is plausible.
    - `edit`, `call`, `order`, `runner`: how the fault is applied. Exactly one is given.
    - `operators`: the operators whose calls `call` replaces.
    - `needs`: conditions on a case without which the fault cannot be applied.
    - `sees`: conditions on a case without which inputs or rounding hide the fault. For example, a fault that reads
      another chunk's positions is hidden if all rows have the same positions.
    - `kinds`: the kinds of tensors that may be the first to differ.
    - `sites`: the calls that a report may blame. For `edit`, the function returns them instead.
    - `rank`: the only rank with the fault, -1 for the last; None if all ranks have it.
    """

    name: str
    says: str
    source: str
    family: Family = "chunking"
    edit: Edit | None = None
    call: TamperCall | None = None
    operators: tuple[str, ...] = ()
    order: str | None = None
    runner: Callable[[Any], None] | None = None
    needs: tuple[Need, ...] = ()
    sees: tuple[Need, ...] = ()
    kinds: tuple[Kind, ...] = ("loss", "grad")
    sites: tuple[Site, ...] = ()
    rank: int | None = None

    def __post_init__(self) -> None:
        ways = [way for way in (self.edit, self.call, self.order, self.runner) if way is not None]
        assert len(ways) == 1, f"{self.name} strikes in {len(ways)} ways"

    @property
    def is_fault(self) -> bool:
        """Whether a run with this entry must differ. False for a rewrite that keeps every bit."""
        return self.family != "equivalent"

    @property
    def all_needs(self) -> tuple[Need, ...]:
        """Return all conditions on a case without which the fault cannot be applied.

        These are `needs` and, if the fault edits graphs, the conditions that all such faults have.
        """
        # Pipeline ranks run different stages, so the wrong rank might not run the changed call at all.
        of_one_rank = (ONE_STAGE,) if self.rank is not None else ()
        return (GRAPH, PLAIN, *of_one_rank, *self.needs) if self.edit else self.needs

    def unmet(self, case: Case) -> list[str]:
        """Return the unmet conditions without which the fault cannot be applied, in words: ["a case that chunks"]."""
        return [need.says for need in self.all_needs if not need.holds(case)]

    def hidden(self, case: Case) -> list[str]:
        """Return the unmet conditions without which the fault is hidden, in words: ["a step computed in float32"]."""
        return [need.says for need in self.sees if not need.holds(case)]

    def rank_of(self, world_size: int) -> int | None:
        """Return the only rank with the fault; None if all ranks have it."""
        # -1 becomes the last rank.
        return None if self.rank is None else self.rank % world_size


def row(
    source: str,
    *,
    operators: tuple[str, ...] = (),
    order: str | None = None,
    runner: bool = False,
    needs: tuple[Need, ...] = (),
    sees: tuple[Need, ...] = (),
    kinds: tuple[Kind, ...] = ("loss", "grad"),
    sites: tuple[Site, ...] = (),
    rank: int | None = None,
    family: Family | None = None,
) -> Callable[[Callable[..., Any]], Entry]:
    """Decorator that turns a function into an entry of the fault catalogue.

    By default, the function edits the candidate's graph. Three arguments change that:

    - `operators`: the function replaces calls of these operators. Unless `sites` is given, a report may blame their
      calls in the optimizer's update.
    - `order`: the ranks' values are added in this order. The function is never called; only its name and docstring are
      used.
    - `runner`: the function changes the object that runs a step with micro-batches, or a built-in loop.

    `family` is by default the name of the function's module. `Entry` describes the other arguments.
    """

    def entry_of(function: Callable[..., Any]) -> Entry:
        # Lists and errors show the first line of the docstring as the fault's description.
        says = (function.__doc__ or "").partition("\n")[0]
        return Entry(
            name=function.__name__.replace("_", "-"),
            says=says.removesuffix("."),
            source=source,
            family=family or cast(Family, function.__module__.rpartition(".")[2]),
            edit=function if not operators and order is None and not runner else None,
            call=function if operators else None,
            operators=operators,
            order=order,
            runner=function if runner else None,
            needs=needs,
            sees=sees,
            kinds=kinds,
            # Calls of the update are outside all modules.
            sites=sites or tuple(Site(None, "update", None, operator) for operator in operators),
            rank=rank,
        )

    return entry_of


@dataclass(frozen=True, kw_only=True)
class Named(Fault):
    """A fault that the user gives by the name of a catalogue entry, such as `no-weight-decay`."""

    kind: ClassVar[str] = "named"
    name: str
    step: int = 0

    @property
    def row(self) -> Entry:
        return catalogue()[self.name]

    def __str__(self) -> str:
        return self.name


def catalogue() -> Mapping[str, Entry]:
    """Return the fault catalogue: all entries by name."""
    # Imported only when a run has a fault: the modules have 4,000 lines.
    from bitproof.harness.disturb.faults.catalogue import CATALOGUE

    return CATALOGUE
