"""What the checker says of memory, beside what a step in which it counts is proved to be (`test_check.py`)."""

import pytest

from bitproof.harness.certificate import operator_names as own
from bitproof.harness.certificate import rules
from bitproof.harness.certificate.calls import _overlaps
from bitproof.harness.certificate.data import Tensor
from bitproof.harness.prove import known_operators


@pytest.mark.parametrize(
    ("shape", "strides", "overlaps"),
    [
        ((2, 3), (3, 1), False),
        ((2, 3), (1, 2), False),
        ((2, 3), (8, 2), False),
        ((1, 3), (0, 1), False),
        ((2, 3), (0, 1), True),
        ((2, 3), (1, 1), True),
        ((2, 3), (2, 1), True),
        ((("size", (1, "u0")), 3), (3, 1), False),
        ((("size", (1, "u0")), 3), (2, 1), True),
        ((2, ("size", (1, "u0"))), (("size", (1, "u0")), 1), True),
    ],
)
def test_two_indices_of_what_overlaps_mean_one_element(shape, strides, overlaps):
    assert _overlaps(Tensor("float32", "cpu", shape, strides, 0, 0)) == overlaps


def test_the_checkers_own_tables_of_operators_say_what_the_provers_say() -> None:
    exact = {own.CAST: "cast", **known_operators.EXACT}
    exact |= {name: known_operators.EXACT[of] for name, of in known_operators.IN_PLACE.items()}
    assert exact == own.EXACT
    assert ({*own.DIVISIONS}, own.POWER) == (known_operators.DIVISIONS, known_operators.POWER)
    assert own.FILLS == known_operators.FILLS
    assert ({*own.CARRIES}, {*own.UPDATES}) == (known_operators.CARRIES, known_operators.UPDATES)
    assert (own.PAD, rules.FLIP) == (known_operators.PAD, known_operators.FLIP)
    assert {*rules.COMMUTING} == known_operators.COMMUTING
    assert {*own.COPIES} == {*known_operators.COPIES, known_operators.COPY_INTO}
    assert {*own.RESHAPES} == known_operators.RESHAPES
    assert own.SPLIT == known_operators.SPLIT
    assert {*own.WAITS} == {name for name in known_operators.WAITS if not name.startswith("torch.")}
    assert {*own.COLLECTIVES} == known_operators.COLLECTIVES
    assert {*own.UNDERSTOOD} == {*own.COLLECTIVES, *own.WAITS, *known_operators.HIGHER_ORDER}
    assert own.UNWRITTEN == known_operators.UNINITIALIZED
    assert all(name.startswith(own.REFUSED) for name in known_operators.REFUSED | known_operators.HIGHER_ORDER)
    assert all(f"{family}.all_reduce.default".startswith(own.REFUSED) for family in known_operators.FAMILIES)
