"""Conditions on data that the step itself asserts: kept as calls of the graph, which raise as eager would.

Three kinds of conditions reach a trace:

1. On tensors (`torch._assert_async`): calls like any other, which `operators.has_effects` keeps alive.
2. On sizes and numbers read from data (`torch._check` of what `.item()` gave), those that mix in the chunked
   dim among them: torch settles them while it traces and leaves nothing behind, so each is written down here
   as a call of `aten._assert_scalar`, where it was asked. A chunk asks it of its own half.
3. On the chunked dim alone: no call; `concretize_symbols` checks them with the numbers there are.

Only what the user's code asserts is written down: what operators assert of their arguments they assert again
whenever they run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import sympy
import torch
import typing_extensions
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from bitproof.harness.errors import TraceError
from bitproof.harness.graph import symbols
from bitproof.harness.graph.origin import user_line
from bitproof.harness.torch_compat import Check, checks_replaced

_WRAPPERS = {torch.__file__, typing_extensions.__file__}
"""The files of `torch._check` and its kin, some of which are wrapped as deprecated."""

_NO_MESSAGE = "expected the condition to be true, but it is false"


@contextmanager
def written_checks(shape_env: ShapeEnv, chunk_symbol: sympy.Symbol) -> Iterator[None]:
    """Within this context, a trace writes down each `torch._check` of data that the user's code makes.

    Raises TraceError for a number from data that is said to be equal to the chunked dim: it would no longer be
    told from that dim, and be cut in two.
    """

    def written(
        check_with: Check, error_type: type[Exception], condition: Any, message: Callable[[], Any] | None
    ) -> None:
        data = symbols.free_symbols(condition) - {chunk_symbol}
        place = _asking_line(sys._getframe(1)) if data else None
        if place is None:
            return check_with(error_type, condition, message)
        text, asked = str(message()) if message is not None else _NO_MESSAGE, str(condition)
        torch.ops.aten._assert_scalar.default(condition, f"{text} (checked at {place})")
        check_with(error_type, condition, message)
        if equal := sorted(str(x) for x in data if chunk_symbol in shape_env.replace(x).free_symbols):
            raise TraceError(
                f"a number from data, {equal[0]}, is said to be equal to what the chunked dim gives",
                expected="bounds, which can be checked once a chunk when the step runs",
                found=f"{asked}, where {chunk_symbol} is the size of the chunked dim",
                where=place,
                fix="check the number against bounds, or compute it from x.shape[...]",
            )
        return None

    with checks_replaced(written):
        yield


def _asking_line(frame: FrameType | None) -> str | None:
    """The user's line that called torch's wrappers, from their innermost `frame`; None when torch itself did."""
    while frame is not None and frame.f_code.co_filename in _WRAPPERS:
        frame = frame.f_back
    return user_line(frame.f_code.co_filename, frame.f_lineno) if frame is not None else None
