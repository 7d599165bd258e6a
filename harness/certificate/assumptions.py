"""A proof's assumptions about the machine and the runs, in words. docs/explanation/proving.md justifies each."""

from __future__ import annotations

from collections.abc import Iterable

from bitproof.harness.certificate.data import Graph

ASSUMPTIONS = (
    ("", "torch traces what eager runs, fake values lie as real ones do, and operators write what schemas say"),
    ("", "a kernel's bits depend on arguments, dtypes, devices, shapes, strides and place in a line of 64 bytes alone"),
    ("", "memory is allocated at such lines, and no two inputs of the step share any"),
    (
        "",
        "a sum, difference, product or cast is the nearest number, ties to even, denormals kept, wherever it stands",
    ),
    ("", "a number beside float32 is rounded to it first; what only carries elements changes none"),
    ("", "no value is a NaN: which of a NaN's bits survive depends on instructions and on operand order"),
    ("", "both runs reach their end: checks that raise compute nothing"),
    ("_c10d_functional", "ranks run one program; a collective's bits depend on ranks in order, sizes, dtypes, values"),
    ("reduce_of_cat", "each element is reduced over ascending ranks, whatever is beside it: NCCL does not promise it"),
    ("_fused_adam", "an optimizer's kernel takes elements that lie in rows one by one, wherever they lie"),
    ("_fused_adamw", "an optimizer's kernel takes elements that lie in rows one by one, wherever they lie"),
    ("_grouped_mm", "offsets of grouped matrix products end at the last row: beyond it is memory that nobody wrote"),
)
"""Assumptions by their cause: a part of an operator's name, or a rule; without a name, every proof."""


def assumed(graphs: Iterable[Graph], rules: Iterable[str]) -> tuple[str, ...]:
    """The assumptions of a proof by these rules about these graphs."""
    operators = {call.op for graph in graphs for call in graph.calls}
    names = {"", *rules, *(name for op in operators for name in op.split(".")[:2])}
    return tuple(text for name, text in ASSUMPTIONS if name in names)
