"""Keeps the step's own assertions about data as calls in the graph, so that they raise as in eager.

1. Assertions about tensors (`torch._assert_async`) are ordinary calls.
2. Assertions about numbers read from data, such as `torch._check(x.item() > 0)`, leave no node: torch evaluates them
   during the trace. This module records each as a call of `aten._assert_scalar`. In a chunked module, each chunk has
   its own call.
3. Assertions only about the chunked dim have no call. `concretize_symbols` checks them with real numbers.

Only assertions in the user's code are recorded. Torch's operators repeat their own assertions whenever they run.
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
"""Files with the variants of `torch._check`. `typing_extensions` wraps the deprecated variants."""

_NO_MESSAGE = "expected the condition to be true, but it is false"


@contextmanager
def written_checks(shape_env: ShapeEnv, chunk_symbol: sympy.Symbol) -> Iterator[None]:
    """Return a context for a trace, in which each `torch._check` of a number read from data becomes a call.

    For example, `torch._check(x.sum().item() > 0)` checks such a number. Only checks in the user's code become calls.
    Raises TraceError for a check that the number equals an expression of the chunked dim, such as `x.shape[0] // 2`.
    """

    def written(
        check_with: Check, error_type: type[Exception], condition: Any, message: Callable[[], Any] | None
    ) -> None:
        # Without data, or if torch itself asks, torch's own check decides and leaves no call.
        data = symbols.free_symbols(condition) - {chunk_symbol}
        place = _asking_line(sys._getframe(1)) if data else None
        if place is None:
            return check_with(error_type, condition, message)
        # The message names the line, since no frame of the user's is on the stack when the graph's check raises.
        text, asked = str(message()) if message is not None else _NO_MESSAGE, str(condition)
        torch.ops.aten._assert_scalar.default(condition, f"{text} (checked at {place})")
        check_with(error_type, condition, message)
        # torch has noted the condition by now: an equality with the chunk symbol replaces the number by an expression
        # of that symbol. Then the number could not be distinguished from the dim, and each chunk would halve it.
        if equal := sorted(str(x) for x in data if chunk_symbol in shape_env.replace(x).free_symbols):
            raise TraceError(
                f"a number from data, {equal[0]}, is asserted to equal an expression of the chunked dim",
                expected="bounds, which can be checked once a chunk when the step runs",
                found=f"{asked}, where {chunk_symbol} is the size of the chunked dim",
                where=place,
                fix="check the number against bounds, or compute it from x.shape[...]",
            )
        return None

    with checks_replaced(written):
        yield


def _asking_line(frame: FrameType | None) -> str | None:
    """Return the user's line that called `torch._check`; None if torch itself called it.

    `frame` is the innermost frame of the call.
    """
    # A variant of `torch._check` calls another, so several frames may be torch's.
    while frame is not None and frame.f_code.co_filename in _WRAPPERS:
        frame = frame.f_back
    return user_line(frame.f_code.co_filename, frame.f_lineno) if frame is not None else None
