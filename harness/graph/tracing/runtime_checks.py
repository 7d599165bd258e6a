"""Conditions on data that the step itself asserts. They stay in the graph as calls, and raise errors as in eager.

Three kinds of conditions reach a trace:

1. Conditions on tensors (`torch._assert_async`) are ordinary calls, which `operators.has_effects` keeps.
2. Conditions on sizes and numbers read from data (`torch._check` of an `.item()`) have no node: torch evaluates them
   during the trace. So this module records each as a call of `aten._assert_scalar`, at its place among the calls. In a
   chunked module, each chunk checks its own half.
3. Conditions on the chunked dim only have no call: `concretize_symbols` checks them with numbers.

Only assertions in the user's code are recorded: operators repeat their own assertions whenever they run.
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
"""The files with `torch._check` and its variants; `typing_extensions` wraps the deprecated variants."""

_NO_MESSAGE = "expected the condition to be true, but it is false"


@contextmanager
def written_checks(shape_env: ShapeEnv, chunk_symbol: sympy.Symbol) -> Iterator[None]:
    """Context for a trace. Each `torch._check` in the user's code becomes a call in the graph if its condition depends
    on data.

    For example, the condition `x.sum().item() > 0` depends on data. Raises TraceError if the condition states that a
    number read from data equals an expression of the chunked dim's size, such as `x.shape[0] // 2`.
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

    `frame` is the innermost frame of the call, in one of torch's wrappers of `torch._check`.
    """
    # A variant of `torch._check` calls another, so several frames may be torch's.
    while frame is not None and frame.f_code.co_filename in _WRAPPERS:
        frame = frame.f_back
    return user_line(frame.f_code.co_filename, frame.f_lineno) if frame is not None else None
