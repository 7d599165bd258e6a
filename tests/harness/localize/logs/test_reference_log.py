"""What the reference answers for, on a log written by hand."""

from __future__ import annotations

from bitproof.harness.localize.logs.calls import Call, Place
from bitproof.harness.localize.logs.reference_log import ReferenceLog

CHUNK_0, CHUNK_1 = (Place("layers.0", "forward", chunk) for chunk in (0, 1))


def test_a_value_is_known_where_it_belongs_and_not_in_the_other_chunk():
    log = ReferenceLog([Call(CHUNK_0, "mm", ("x",), ("a",)), Call(CHUNK_1, "mm", ("y",), ("b",))])
    assert log.knows(Call(CHUNK_0, "mm", ("x",), ("a",)))
    assert not log.knows(Call(CHUNK_1, "mm", ("x",), ("a",)))


def test_a_new_operators_call_is_known_by_its_values_alone():
    log = ReferenceLog([Call(CHUNK_0, "mm", ("x",), ("a",))])
    assert log.knows(Call(CHUNK_1, "copy", ("x",), ("a",)))
    assert not log.knows(Call(CHUNK_1, "copy", ("x",), ("b",)))


def test_the_partner_of_a_call_has_its_inputs_and_the_order_counts_where_it_matters():
    log = ReferenceLog([Call(CHUNK_0, "sub", ("x", "y"), ("a",)), Call(CHUNK_0, "add", ("x", "y"), ("b",))])
    assert log.partner(Call(CHUNK_0, "sub", ("x", "y"), ("z",)), 0) == (0, "computes")
    assert log.partner(Call(CHUNK_0, "sub", ("y", "x"), ("z",)), 0) == (0, "exchanges")
    assert log.partner(Call(CHUNK_0, "add", ("y", "x"), ("z",)), 0) == (1, "computes")
    assert log.partner(Call(CHUNK_0, "sub", ("u", "v"), ("z",)), 0) == (0, None)
