"""The columns of the table of operators: facts about an operator that its schema does not state.

The name of a row stands for one of these:

- All overloads of an operator: `aten.empty_like`. In some columns the row lists the overloads that have a property.
- All operators of a namespace that have no row: `c10d.*`.
- A function of Python: `_operator.getitem`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto


class Uninitialized(Enum):
    """The part of an operator's result that is uninitialized memory."""

    WHOLE = "all of it"
    GROWN = "what its argument had no room for"


class Work(Enum):
    """A kind of work that continues after the call that launched it has returned. A wait ends only work of its own
    kind."""

    COLLECTIVE = "a collective"
    OFFLOAD = "a copy to host memory"
    RELOAD = "a copy from host memory"
    TRANSFER = "a copy to host memory or from there"


class Sync(Enum):
    """An operator's effect on CUDA streams and events. The operator's arguments are numbers of streams and events."""

    SWITCH = "what follows runs on the second stream"
    RECORD = "the event holds what the stream was given"
    WAIT_EVENT = "the stream waits for the event"
    WAIT_STREAM = "the first stream waits for the second"
    HOST_WAITS_EVENT = "the host waits for the event"
    HOST_WAITS_STREAM = "the host waits for the stream"
    HOST_WAITS = "the host waits for everything"
    KEEP = "the allocator keeps the tensor for the stream"


class Hides(Enum):
    """A reason why a small error in an operator's inputs may not change its result."""

    CHOICE = "it takes some elements, and the wrong ones may not be among them"
    ORDER = "it decides by order or sign, which a small error leaves as it was"
    SHAPE = "it reads a shape alone, or overwrites its arguments"
    MASK = "it overwrites or masks some elements"
    PRODUCT = "it multiplies, and the other factor may be zero"


class RowFlow(Enum):
    """The rows of an operator's arguments from which a row of its result is computed.

    A row has all elements at one index of the dim that chunks divide. `graph.analysis.mixing_rules` has a rule for each
    value. EACH_ means that the operator has several results, and the rule applies to each.
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

    The work reads the operator's arguments and fills its results.

    - `takes`: the verb in errors for what the work does with the arguments, such as "sends".
    - `holds_source`: whether the caller must keep the memory of the arguments until the wait.
    - `awaited_by_source`: whether the work fills no result, as a send does. Then a wait for an argument ends the work.
    """

    work: Work
    takes: str = "sends"
    holds_source: bool = False
    awaited_by_source: bool = False


@dataclass(frozen=True, kw_only=True)
class Wait:
    """The property of an operator that waits for launched work: the work that fills the argument called `argument`.

    The operator itself reads no elements.
    """

    work: Work
    argument: str


@dataclass(frozen=True, kw_only=True)
class Operator:
    """A row of the table: the known facts about an operator. Each field is a column.

    Some columns have names of overloads. Then the property holds for these overloads only.
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
    """The argument whose memory is freed when the awaited work is done."""
    returns: str | None = None
    """The argument whose memory the result shares, though the schema does not say so."""
    adopts: str | None = None
    """The argument whose memory `self` uses from then on."""
    runs_operator: bool = False
    """It runs an operator, one of its arguments, on all arguments after it."""
    writes: str | None = None
    """The argument that is written or freed, though the schema does not say so."""
    counts_in: tuple[str, ...] = ()
    """The arguments that it writes in training, though the schema does not say so: the running statistics of a batch
    norm."""
    reads_layout: bool = False
    """It reads only the shape, strides or other properties of its arguments, and no element."""
    may_copy: bool = False
    """The result is a view of the argument, or a copy if no view is possible."""
    reads_memory: bool = False
    """It returns raw memory, not a tensor's values, or shares its argument's memory although the schema does not say
    so."""

    # Elements that keep their values.
    is_identity: bool = False
    """It returns its argument, or a view of the argument with all elements at the same indices."""
    copies: str | None = None
    """The argument that the result copies into new memory, if both have the same dtype."""
    rearranges: str | None = None
    """The overload that changes dims and leaves every element unchanged."""
    is_sized: bool = False
    """The result is a view, and the call states its sizes, as `expand` does."""
    keeps_order: bool = False
    """The result has its argument's elements in the same order."""
    reshapes: bool = False
    """The overload `default` returns all elements in their order, in its argument's memory or in new memory."""
    joins: bool = False
    """The overload `default` concatenates tensors along a dim."""
    packs: bool = False
    """It packs values together, or takes packed values apart."""
    moves: bool = False
    """It moves elements by index, or concatenates tensors. If its inputs are computed in parts, so is its result."""

    # The computation.
    exact: str | None = None
    """The overload that computes each element only from the elements at the same index, with at most one rounding.

    This holds if the operands' dtypes fit and `alpha` is 1. `Tensor` includes `Scalar`.
    """
    fills: tuple[str, float | str] | None = None
    """The overload that fills its result with a number. The second value is the number, or the argument that has it."""
    carries: str | None = None
    """The overload that copies elements to other indices. Index arguments or sizes determine which elements; strides
    never do."""
    in_place_of: str | None = None
    """The operator that computes the same result in new memory, while this operator writes it into `self`. Overloads
    have the same names."""
    counts_as: str | None = None
    """The operator that also returns, in new memory, the values that this operator writes: a batch norm's statistics,
    or an optimizer's parameters and moments."""
    commutes: bool = False
    """Exchanging its two tensor arguments does not change the result."""
    is_constant: bool = False
    """No input tensor's values affect the result."""
    factors_from: int | None = None
    """It multiplies two matrices. This is the index of the first of them among its arguments."""
    is_batched: bool = False
    """It multiplies two batches of matrices, pair by pair."""
    scales: str | None = None
    """It multiplies ("*") or divides ("/") its first argument, or each tensor in it, by a number: the second
    argument."""
    attends: bool = False
    """It is an attention operator: it mixes the positions of a sequence."""
    sums_ranks: bool = False
    """It is a collective that adds the values of several ranks."""
    exchanges: bool = False
    """It is a collective that exchanges rows between ranks."""
    adds: str | None = None
    """It adds elements of its first argument along dims, or computes their mean. This is the name of the argument with
    the dims."""
    pairs_ranks: bool = False
    """It sends to a single rank, or receives from a single rank. The other ranks of the group need not call it."""
    draws_untagged: bool = False
    """It draws random numbers, although torch does not tag it so."""
    overwrites: tuple[str, ...] = ()
    """The overloads that overwrite every element of `self` with random numbers, and read no element."""
    hides: Hides | None = None
    """The reason why it can hide an error in its inputs."""

    # Rows, which chunks divide.
    rows: RowFlow | None = None
    """The rows from which a row of the result is computed. None if unknown, or if torch tags the operator as
    pointwise."""
    returns_positions: bool = False
    """Its values are positions, as those of `arange`. In a chunk they count from the start of the chunk."""
    num_elements: int | None = None
    """The number of arguments whose elements it reads; later arguments are indices or sizes. None if it reads the
    elements of all arguments."""

    # Permissions in graphs.
    allowed: tuple[str, ...] = ()
    """The overloads that a graph from a file may call: those of training steps on the CPU or on CUDA, and those that
    passes insert.

    None of them opens a file, loads code, calls back into Python, or reads memory by an address.
    """
    checks: tuple[str, ...] = ()
    """The overloads that only check: they raise or return, and do nothing else. A token that they return has no
    meaning.

    By its schema, `manual_seed` returns and writes nothing either, but it is no such check.
    """
    measures: str | None = None
    """The overload that returns a number of a tensor's layout, such as a size."""
    is_understood: bool = False
    """It is a collective or a higher-order operator whose effect the prover knows. The prover refuses all others."""

    def overload(self, name: str) -> str:
        """Return the full name of an overload, such as "aten.add.Tensor". A higher-order operator has only the overload
        ""."""
        return f"{self.name}.{name}" if name else self.name
