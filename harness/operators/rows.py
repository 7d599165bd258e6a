"""The table of operators: what a schema does not say of them.

An operator is known by namespace and name, without overload: `aten.empty_like`. A row holds for all its overloads. A
row whose name ends in `.*` holds for every operator of a namespace that has no row of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Uninitialized(Enum):
    """Which part of an operator's result is whatever memory held."""

    WHOLE = "all of it"
    GROWN = "what its argument had no room for"


class Work(Enum):
    """What runs on beside the calls that follow its launch. A wait ends work of its own kind and no other."""

    COLLECTIVE = "a collective"
    OFFLOAD = "a copy to host memory"
    RELOAD = "a copy from host memory"


@dataclass(frozen=True, kw_only=True)
class Launch:
    """An operator returns before its work is done: its results are filled, and its tensor arguments read, until then.

    `takes` is the verb for reading the arguments. With `holds_source` the caller must keep the memory that is read
    until the wait; without, the runtime does.
    """

    work: Work
    takes: str = "sends"
    holds_source: bool = False


@dataclass(frozen=True, kw_only=True)
class Wait:
    """After this operator the work that fills one argument is done. It reads no element of any argument."""

    work: Work
    argument: str


@dataclass(frozen=True, kw_only=True)
class Operator:
    """One row. `returns` names an argument whose memory the result shares, and `writes` one that is written or let go,
    though the schema does not say so.

    With `reads_layout` it reads its arguments' layout and no element; with `may_copy` its result is a view of its
    argument or, where no view will do, a copy.
    """

    name: str
    uninitialized: Uninitialized | None = None
    launch: Launch | None = None
    wait: Wait | None = None
    returns: str | None = None
    writes: str | None = None
    reads_layout: bool = False
    may_copy: bool = False


_COLLECTIVE = Launch(work=Work.COLLECTIVE)
_WHOLE, _GROWN = Uninitialized.WHOLE, Uninitialized.GROWN

_ROWS = (
    # Memory that nobody wrote. `empty_like` and `new_empty` ask their argument for its layout alone.
    Operator(name="aten.empty", uninitialized=_WHOLE),
    Operator(name="aten.empty_like", uninitialized=_WHOLE, reads_layout=True),
    Operator(name="aten.empty_permuted", uninitialized=_WHOLE),
    Operator(name="aten.empty_quantized", uninitialized=_WHOLE, reads_layout=True),
    Operator(name="aten.empty_strided", uninitialized=_WHOLE),
    Operator(name="aten.new_empty", uninitialized=_WHOLE, reads_layout=True),
    Operator(name="aten.new_empty_strided", uninitialized=_WHOLE, reads_layout=True),
    Operator(name="aten._empty_affine_quantized", uninitialized=_WHOLE),
    Operator(name="aten._empty_per_channel_affine_quantized", uninitialized=_WHOLE),
    Operator(name="aten._make_dep_token", uninitialized=_WHOLE),
    Operator(name="prims.empty", uninitialized=_WHOLE),
    Operator(name="prims.empty_permuted", uninitialized=_WHOLE),
    Operator(name="prims.empty_strided", uninitialized=_WHOLE),
    Operator(name="aten.resize", uninitialized=_GROWN),
    Operator(name="aten.resize_", uninitialized=_GROWN),
    Operator(name="aten.resize_as", uninitialized=_GROWN),
    Operator(name="aten.resize_as_", uninitialized=_GROWN),
    Operator(name="aten._resize_output", uninitialized=_GROWN),
    Operator(name="aten._resize_output_", uninitialized=_GROWN),
    Operator(name="prims.resize", uninitialized=_GROWN),
    # Collectives, each of which is there once `wait_tensor` of its result has returned.
    Operator(name="_c10d_functional.*", launch=_COLLECTIVE),
    Operator(name="_c10d_functional_autograd.*", launch=_COLLECTIVE),
    Operator(name="_c10d_functional.irecv", launch=_COLLECTIVE, returns="tensor"),
    Operator(name="_c10d_functional.isend", launch=_COLLECTIVE, returns="tensor"),
    Operator(name="_c10d_functional.batch_p2p_ops", launch=_COLLECTIVE, returns="tensors"),
    Operator(name="_c10d_functional.wait_tensor", wait=Wait(work=Work.COLLECTIVE, argument="tensor"), returns="tensor"),
    Operator(
        name="torch.distributed._functional_collectives.wait_tensor",
        wait=Wait(work=Work.COLLECTIVE, argument="tensor"),
        returns="tensor",
    ),
    # Copies to host memory and back (harness/graph/offload_operators.py).
    Operator(name="bitproof.offload", launch=Launch(work=Work.OFFLOAD, takes="copies", holds_source=True)),
    Operator(name="bitproof.wait_offload", wait=Wait(work=Work.OFFLOAD, argument="host"), returns="host"),
    Operator(name="bitproof.reload", launch=Launch(work=Work.RELOAD, takes="copies")),
    Operator(name="bitproof.wait_reload", wait=Wait(work=Work.RELOAD, argument="x"), returns="x"),
    # What lets memory go.
    Operator(name="inductor.resize_storage_bytes_", writes="variable"),
    # Values that are asked for their layout alone.
    *(
        Operator(name=f"aten.{name}", reads_layout=True)
        for name in (
            *("new_zeros", "new_ones", "new_full", "zeros_like", "ones_like", "full_like"),
            *("rand_like", "randn_like", "randint_like", "is_same_size", "_assert_tensor_metadata"),
            *("sym_size", "sym_stride", "sym_numel", "sym_storage_offset", "sym_is_contiguous"),
            *("size", "stride", "numel", "dim", "storage_offset", "is_contiguous", "is_floating_point"),
        )
    ),
    # Views, where one will do.
    Operator(name="aten._unsafe_view", returns="self"),
    *(
        Operator(name=f"aten.{name}", may_copy=True)
        for name in ("reshape", "reshape_as", "flatten", "ravel", "contiguous", "to", "type_as", "cpu", "cuda")
    ),
)

ROWS: dict[str, Operator] = {row.name: row for row in _ROWS}
assert len(ROWS) == len(_ROWS), "an operator has one row"


def known(name: str) -> Operator:
    """The row of an operator such as `aten.empty_like`; of one that is in no row, a row that says nothing."""
    if (row := ROWS.get(name)) is not None:
        return row
    return ROWS.get(f"{name.partition('.')[0]}.*") or Operator(name=name)


def names_of_uninitialized(*parts: Uninitialized) -> frozenset[str]:
    """The names, without namespace and overload, of operators of whose result this much is whatever memory held."""
    return frozenset(row.name.partition(".")[2] for row in _ROWS if row.uninitialized in parts)
