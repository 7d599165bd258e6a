"""A row of the table of operators: facts that the operator's schema does not state.

A row's name is namespace and name, without overload: `aten.empty_like`. It applies to all overloads, except for columns
that name overloads. A row whose name ends in `.*` applies to all operators of a namespace without their own row.
Python's own functions have rows, too: `_operator.getitem`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto


class Uninitialized(Enum):
    """Which part of an operator's result is whatever memory held."""

    WHOLE = "all of it"
    GROWN = "what its argument had no room for"


class Work(Enum):
    """What runs on beside the calls that follow its launch. A wait ends work of its own kind and no other."""

    COLLECTIVE = "a collective"
    OFFLOAD = "a copy to host memory"
    RELOAD = "a copy from host memory"
    TRANSFER = "a copy to host memory or from there"


class Sync(Enum):
    """An operator's effect on streams and events, which it names by numbers."""

    SWITCH = "what follows runs on the second stream"
    RECORD = "the event holds what the stream was given"
    WAIT_EVENT = "the stream waits for the event"
    WAIT_STREAM = "the first stream waits for the second"
    HOST_WAITS_EVENT = "the host waits for the event"
    HOST_WAITS_STREAM = "the host waits for the stream"
    HOST_WAITS = "the host waits for everything"
    KEEP = "the allocator keeps the tensor for the stream"


class Hides(Enum):
    """How an operator hides an error in what it reads."""

    CHOICE = "it takes some elements, and the wrong ones may not be among them"
    ORDER = "it decides by order or sign, which a small error leaves as it was"
    SHAPE = "it reads a shape alone, or overwrites its arguments"
    MASK = "it overwrites or masks some elements"
    PRODUCT = "it multiplies, and the other factor may be zero"


class RowFlow(Enum):
    """Which rows of its arguments an operator computes a row of its result from (`graph.analysis.mixing_rules` has a
    rule for each). EACH_ is the same for every one of several results.
    """

    ELEMENTWISE = auto()
    EACH_ELEMENTWISE = auto()
    VIEW = auto()
    PERMUTE = auto()
    SQUEEZE = auto()
    UNSQUEEZE = auto()
    CUT = auto()
    SPLIT = auto()
    TAKE = auto()
    EACH_TAKE = auto()
    JOIN = auto()
    STACK = auto()
    REDUCE = auto()
    EACH_REDUCE = auto()
    ALONG = auto()
    EACH_ALONG = auto()
    MATMUL = auto()
    MATRIX_VECTOR = auto()
    GROUPED = auto()
    NORMALIZED = auto()
    EACH_NORMALIZED = auto()
    CONVOLUTION = auto()
    EACH_CONVOLUTION = auto()
    EMBEDDING = auto()
    SEARCH = auto()
    GATHER = auto()
    SCATTER = auto()
    INDEX = auto()
    INDEX_PUT = auto()
    ALL_TO_ALL = auto()
    ALL_GATHER = auto()
    REDUCE_SCATTER = auto()
    SELECT = auto()
    COPY_INTO = auto()
    EACH_OF_BATCH = auto()


@dataclass(frozen=True, kw_only=True)
class Launch:
    """An operator returns before its work is done: its results are filled, and its tensor arguments read, until then.

    `takes` is the verb for reading the arguments. With `holds_source` the caller must keep the memory that is read
    until the wait; without, the runtime does. With `awaited_by_source` a wait for what is read ends the work, too: it
    fills nothing.
    """

    work: Work
    takes: str = "sends"
    holds_source: bool = False
    awaited_by_source: bool = False


@dataclass(frozen=True, kw_only=True)
class Wait:
    """After this operator the work that fills one argument is done. It reads no element of any argument."""

    work: Work
    argument: str


@dataclass(frozen=True, kw_only=True)
class Operator:
    """One row. Where a column names one overload or several, it holds for those alone."""

    name: str

    # Memory, and what is on its way in it.
    uninitialized: Uninitialized | None = None
    """Which part of the result is whatever memory held."""
    launch: Launch | None = None
    """What runs on after the call has returned."""
    wait: Wait | None = None
    """What is done after the call."""
    sync: Sync | None = None
    """The call's effect on streams and events."""
    frees: str | None = None
    """The argument whose memory is let go once what the call waits for is done."""
    returns: str | None = None
    """The argument whose memory the result shares, though the schema does not say so."""
    adopts: str | None = None
    """The argument whose memory `self` has from then on."""
    runs_operator: bool = False
    """It runs an operator that stands among its arguments, with the arguments that follow."""
    writes: str | None = None
    """The argument that is written or let go, though the schema does not say so."""
    counts_in: tuple[str, ...] = ()
    """The arguments that it writes in training, though the schema does not say so: running statistics."""
    reads_layout: bool = False
    """It reads its arguments' layout and no element."""
    may_copy: bool = False
    """The result is a view of the argument or, where no view will do, a copy."""
    reads_memory: bool = False
    """It shows what lies in memory, not what a tensor's values are, or hands its argument's memory on untold."""

    # Elements that keep their values.
    is_identity: bool = False
    """It gives its argument, or a view of it with all elements in their places."""
    copies: str | None = None
    """The argument whose values the result has in memory of its own, where its dtype is the same."""
    rearranges: str | None = None
    """The overload that changes dims and leaves every element as it is."""
    is_sized: bool = False
    """The result of a view has the sizes that the call names."""
    keeps_order: bool = False
    """A view has its argument's elements in their order."""
    reshapes: bool = False
    """`default` shows all elements in their order, in its argument's memory or in their own."""
    joins: bool = False
    """`default` puts tensors one after the other along a dim."""
    packs: bool = False
    """It puts values together, or gives parts of them."""
    moves: bool = False
    """It moves elements by index, or puts them together: of a split value it shows a split."""

    # What is computed.
    exact: str | None = None
    """The overload that computes each element only from the elements at its index, with at most one rounding, if the
    operands' dtypes fit and alpha is 1; `Tensor` includes `Scalar`."""
    fills: tuple[str, float | str] | None = None
    """The overload whose result holds one number everywhere, and that number, or the argument that gives it."""
    carries: str | None = None
    """The overload that copies elements to other places, by indices or by sizes: no layout decides which."""
    in_place_of: str | None = None
    """The operator whose result it leaves in `self`, in the overload of the same name."""
    counts_as: str | None = None
    """The operator that gives, in memory of its own, what this one writes: a batch's statistics besides its results, or
    parameters and moments."""
    commutes: bool = False
    """The result does not depend on which of two tensors comes first."""
    is_constant: bool = False
    """No tensor that it reads decides a value."""
    factors_from: int | None = None
    """It multiplies two matrices; this is the place of the first among its arguments."""
    is_batched: bool = False
    """It multiplies matrices, a pair for each index of a batch."""
    scales: str | None = None
    """How it changes its first argument, or each tensor of it, by a number that comes second: "*" or "/"."""
    attends: bool = False
    """It mixes the positions of a sequence."""
    sums_ranks: bool = False
    """A collective that adds values of several ranks."""
    exchanges: bool = False
    """A collective that hands each rank other rows."""
    adds: str | None = None
    """It adds the elements of its first argument along dims, or takes their mean; this is the argument of the dims."""
    pairs_ranks: bool = False
    """It sends to one rank, or receives from one: the group's other ranks need not call it."""
    draws_untold: bool = False
    """It draws random numbers, and torch does not tag it so."""
    overwrites: tuple[str, ...] = ()
    """The overloads that draw every element of `self`, and read none of them."""
    hides: Hides | None = None
    """How it hides an error in what it reads."""

    # Rows, which chunks divide.
    rows: RowFlow | None = None
    """The rows from which a row of the result is computed; None if unknown, or if torch tags the operator as
    pointwise."""
    counts_places: bool = False
    """It counts places: within a chunk, places of the chunk."""
    num_elements: int | None = None
    """The number of arguments that hold elements; the others say where those go. None where all do."""

    # What graphs may do.
    allowed: tuple[str, ...] = ()
    """The overloads that a graph from elsewhere may call: what a training step computes with, on the CPU or on CUDA, or
    what a pass writes. None of them opens a file, loads code, calls back into Python or reads memory by an address."""
    checks: tuple[str, ...] = ()
    """The overloads that raise or do not, and do nothing else; a token that they pass on means nothing. An operator
    that returns nothing, and says that it writes nothing, need not be one: `manual_seed`."""
    measures: str | None = None
    """The overload that reads a number off a tensor's layout."""
    is_understood: bool = False
    """A proof knows what this collective or higher-order operator does; it refuses any other."""

    def overload(self, name: str) -> str:
        """The full name of an overload: `aten.add.Tensor`. A higher-order operator has none: ""."""
        return f"{self.name}.{name}" if name else self.name
