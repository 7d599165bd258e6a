"""A row of the table of operators: facts about an operator that its schema does not state.

The row's name selects the operators:

- `aten.empty_like`: all overloads of an operator. Some columns name overloads to which they apply.
- a name that ends in `.*`: all operators of a namespace that have no row.
- `_operator.getitem`: a function of Python.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto


class Uninitialized(Enum):
    """Which part of an operator's result is uninitialized memory."""

    WHOLE = "all of it"
    GROWN = "what its argument had no room for"


class Work(Enum):
    """A kind of work that runs concurrently with the calls after its launch. A wait ends only work of its own kind."""

    COLLECTIVE = "a collective"
    OFFLOAD = "a copy to host memory"
    RELOAD = "a copy from host memory"
    TRANSFER = "a copy to host memory or from there"


class Sync(Enum):
    """An operator's effect on streams and events. The operator's arguments identify these by number."""

    SWITCH = "what follows runs on the second stream"
    RECORD = "the event holds what the stream was given"
    WAIT_EVENT = "the stream waits for the event"
    WAIT_STREAM = "the first stream waits for the second"
    HOST_WAITS_EVENT = "the host waits for the event"
    HOST_WAITS_STREAM = "the host waits for the stream"
    HOST_WAITS = "the host waits for everything"
    KEEP = "the allocator keeps the tensor for the stream"


class Hides(Enum):
    """Why a small error in an operator's inputs may not show in its result."""

    CHOICE = "it takes some elements, and the wrong ones may not be among them"
    ORDER = "it decides by order or sign, which a small error leaves as it was"
    SHAPE = "it reads a shape alone, or overwrites its arguments"
    MASK = "it overwrites or masks some elements"
    PRODUCT = "it multiplies, and the other factor may be zero"


class RowFlow(Enum):
    """Which rows of its arguments an operator needs to compute a row of its result.

    `graph.analysis.mixing_rules` has a rule for each value. EACH_ means that it applies to each of several results.
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
    """The property of an operator that returns before its work is done, such as a collective.

    The work reads the operator's arguments, and fills its results.

    - `takes`: the verb with which errors describe this reading, such as "sends".
    - `holds_source`: the caller must keep the memory of the arguments until the wait.
    - `awaited_by_source`: the work fills no result, as in a send. A wait for an argument completes the work.
    """

    work: Work
    takes: str = "sends"
    holds_source: bool = False
    awaited_by_source: bool = False


@dataclass(frozen=True, kw_only=True)
class Wait:
    """The property of an operator that waits for launched work: the work that fills its argument `argument`.

    The operator itself reads no elements.
    """

    work: Work
    argument: str


@dataclass(frozen=True, kw_only=True)
class Operator:
    """An operator's row in the table of operators. Each field is a column, and states a property of the operator.

    If a column names overloads of the operator, the property applies to these overloads only.
    """

    name: str

    # Memory, and unfinished work on it.
    uninitialized: Uninitialized | None = None
    """The part of the result that is uninitialized memory."""
    launch: Launch | None = None
    """The work that continues after the call has returned."""
    wait: Wait | None = None
    """The work that the call waits for."""
    sync: Sync | None = None
    """The call's effect on streams and events."""
    frees: str | None = None
    """The argument whose memory is freed once the awaited work is done."""
    returns: str | None = None
    """The argument whose memory the result shares, though the schema does not say so."""
    adopts: str | None = None
    """The argument whose memory `self` shares from then on."""
    runs_operator: bool = False
    """It runs an operator that is among its arguments, and passes all arguments after the operator to it."""
    writes: str | None = None
    """The argument that is written or freed, though the schema does not say so."""
    counts_in: tuple[str, ...] = ()
    """The arguments that it writes in training, though the schema does not say so: running statistics."""
    reads_layout: bool = False
    """It reads its arguments' layout and no element."""
    may_copy: bool = False
    """The result is a view of the argument or, if no view is possible, a copy."""
    reads_memory: bool = False
    """It exposes raw memory, not a tensor's values, or shares its argument's memory without stating so."""

    # Elements that keep their values.
    is_identity: bool = False
    """It returns its argument, or a view of it with all elements at the same indices."""
    copies: str | None = None
    """The argument whose values the result copies into memory of its own, if its dtype is the same."""
    rearranges: str | None = None
    """The overload that changes dims and leaves every element unchanged."""
    is_sized: bool = False
    """The call states the sizes of its result, a view, as `expand` does."""
    keeps_order: bool = False
    """The result has its argument's elements in the same order."""
    reshapes: bool = False
    """The overload `default` returns all elements in their order, in its argument's memory or in new memory."""
    joins: bool = False
    """The overload `default` concatenates tensors along a dim."""
    packs: bool = False
    """It packs values together, or returns parts of them."""
    moves: bool = False
    """It moves elements by index, or concatenates tensors: if its inputs are split, so is its result."""

    # The computation.
    exact: str | None = None
    """The overload that computes each element only from the elements at its index, with at most one rounding, if the
    operands' dtypes fit and alpha is 1; `Tensor` includes `Scalar`."""
    fills: tuple[str, float | str] | None = None
    """The overload whose result is filled with a number, and that number, or the argument that contains it."""
    carries: str | None = None
    """The overload that copies elements to other indices. Index arguments or sizes choose the elements, never a
    layout."""
    in_place_of: str | None = None
    """The operator whose result this operator writes into `self`. Overloads correspond by name."""
    counts_as: str | None = None
    """The operator that returns, in new memory, the values that this operator writes: a batch's statistics besides its
    results, or parameters and moments."""
    commutes: bool = False
    """The result does not depend on the order of two tensor arguments."""
    is_constant: bool = False
    """No input tensor affects a value of the result."""
    factors_from: int | None = None
    """It multiplies two matrices; this is the index of the first among its arguments."""
    is_batched: bool = False
    """It multiplies matrices, a pair for each index of a batch."""
    scales: str | None = None
    """How it changes its first argument, or each tensor of it, by the number in the second: "*" or "/"."""
    attends: bool = False
    """It mixes the positions of a sequence."""
    sums_ranks: bool = False
    """It is a collective that adds values of several ranks."""
    exchanges: bool = False
    """It is a collective that exchanges rows between ranks."""
    adds: str | None = None
    """It adds the elements of its first argument along dims, or computes their mean; this is the argument of the
    dims."""
    pairs_ranks: bool = False
    """It sends to a rank, or receives from a rank: the group's other ranks need not call it."""
    draws_untold: bool = False
    """It draws random numbers, without torch's tag for that."""
    overwrites: tuple[str, ...] = ()
    """The overloads that draw every element of `self`, and read none of them."""
    hides: Hides | None = None
    """How it can hide an error in its inputs."""

    # Rows, which chunks divide.
    rows: RowFlow | None = None
    """The rows from which a row of the result is computed; None if unknown, or if torch tags the operator as
    pointwise."""
    counts_places: bool = False
    """Its values are positions, as those of `arange`: in a chunk they count from the chunk's start."""
    num_elements: int | None = None
    """The number of arguments with elements; the others are indices or sizes. None if all have elements."""

    # Permissions in graphs.
    allowed: tuple[str, ...] = ()
    """The overloads that a graph from elsewhere may call: those of training steps on the CPU or on CUDA, and those that
    passes insert. None of them opens a file, loads code, calls back into Python or reads memory by an address."""
    checks: tuple[str, ...] = ()
    """The overloads that only raise or return, without other effects; a token that they pass on means nothing. An
    operator that returns nothing, and whose schema states no write, need not be such a check: `manual_seed`."""
    measures: str | None = None
    """The overload that reads a number from a tensor's layout."""
    is_understood: bool = False
    """A proof knows the effect of this collective or higher-order operator; it refuses any other."""

    def overload(self, name: str) -> str:
        """Return the full name of an overload: `aten.add.Tensor`. A higher-order operator has only the overload ""."""
        return f"{self.name}.{name}" if name else self.name
