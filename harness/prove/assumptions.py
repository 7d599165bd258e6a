"""What a proof takes for granted of the machine and the runs, in words. docs/proving.md argues each."""

from __future__ import annotations

from harness.certificate.data import Graph
from harness.prove.rules import reduce_of_cat
from harness.prove.terms import Table

ALWAYS = (
    "torch traces what eager runs, its fake values are laid out as real ones, and operators write what their schemas "
    "say",
    "a kernel's bits depend on nothing but its arguments, their values, dtypes, devices, shapes and strides, and on "
    "where their first elements stand within a line of 64 bytes",
    "memory is allocated at such lines, and no two inputs of the step share any",
    "one addition, subtraction, multiplication or cast of real or whole numbers gives an element the same bits "
    "wherever it stands, in a vector's body or in its tail",
    "no value is a NaN: which of a NaN's bits survive an operation is a matter of instructions and operand order",
    "both runs reach their end: checks that raise compute nothing",
)
COLLECTIVES = (
    "every rank runs the same program, and a collective's bits depend on its group's ranks in order, on sizes, dtypes "
    "and values"
)
BUCKETS = (
    "a reduction over ranks adds each element in one order, ascending ranks, however many elements stand beside it: "
    "true of gloo as bitproof runs it, not promised by NCCL"
)
GROUPED = "offsets of grouped matrix products end at the last row: rows beyond it would be memory that nobody wrote"


def assumptions_of(table: Table, graphs: tuple[Graph, Graph]) -> list[str]:
    """What a proof with these steps, of these graphs, rests on."""
    operators = {call.op.split(".")[1] for graph in graphs for call in graph.calls if "." in call.op}
    namespaces = {call.op.split(".")[0] for graph in graphs for call in graph.calls}
    found = list(ALWAYS)
    if "_c10d_functional" in namespaces:
        found.append(COLLECTIVES)
    if reduce_of_cat.__name__ in table.used():
        found.append(BUCKETS)
    if "_grouped_mm" in operators:
        found.append(GROUPED)
    return found
