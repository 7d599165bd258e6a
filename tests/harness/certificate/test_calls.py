"""What the checker says of memory, beside what a step in which it counts is proved to be (`test_check.py`)."""

import pytest

from bitproof.harness.certificate_checker import overlaps
from tests.harness.certificate.test_check import as_json


@pytest.mark.parametrize(
    ("shape", "strides", "expected"),
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
def test_two_indices_of_what_overlaps_mean_one_element(shape, strides, expected):
    assert overlaps(as_json(("float32", "cpu", shape, strides, 0, 0))) == expected
