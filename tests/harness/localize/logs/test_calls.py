from __future__ import annotations

import pytest

from bitproof.harness.errors import RecordingError
from bitproof.harness.localize.logs.calls import Call, CallSite, calls_from_text, calls_to_text

CALLS = [
    Call(
        CallSite("layers.0", "forward", 1),
        "aten.mm.default",
        ("a", "b"),
        ("c",),
        node="mm",
        producers=(None, 3),
        scalars=(("alpha", "1"),),
    ),
    Call(CallSite(None, None), "aten.add_.Tensor", (), ("d",), aliases=("e",), collective=True),
]


def test_a_log_comes_back_as_it_was_written() -> None:
    assert calls_from_text(calls_to_text(CALLS), "here") == CALLS


@pytest.mark.parametrize("text", ["{", "[1]", "null", '[["m", "forward"]]'])
def test_a_damaged_log_is_refused_with_its_place(text) -> None:
    with pytest.raises(RecordingError, match="a log of operator calls is damaged") as error:
        calls_from_text(text, "rank 3's log")
    assert error.value.where == "rank 3's log"


def test_a_call_shows_its_operator_and_its_place() -> None:
    lines = ["aten.mm.default of layers.0 (forward, chunk 1)", "aten.add_.Tensor of the step itself"]
    assert [str(call) for call in CALLS] == [lines[0], f"{lines[1]} (direction not known)"]
