"""Wraps the private parts of torch.compile that bitproof uses, with its counters and its structured trace."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FunctionType
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._logging import trace_structured
from torch.fx import GraphModule
from torch.fx._lazy_graph_module import _use_lazy_graph_module


def lazily_compiled() -> AbstractContextManager[Any]:
    """Return a context in which new graph modules generate their Python code only at first use."""
    return _use_lazy_graph_module(True)


def compile_counters() -> dict[str, dict[str, int]]:
    """Return five groups of Dynamo's counters: group name, such as "graph_break" -> counter name -> count."""
    from torch._dynamo.utils import counters

    return {name: dict(counters[name]) for name in ("frames", "stats", "graph_break", "unimplemented", "dynamo_cache")}


def is_of_compiler(function: FunctionType) -> bool:
    return str(function.__module__).startswith("torch._dynamo")


@contextmanager
def on_compile(
    asked: Callable[[str, bool], None], called: Callable[[], None], recompiled: Callable[[str], None]
) -> Iterator[None]:
    """Context in which callbacks report each use of torch.compile.

    - `asked(backend_name, fullgraph)`: torch.compile was called without `disable`.
    - `called()`: code that was passed to torch.compile runs, whether or not it is compiled.
    - `recompiled(reason)`: a frame is compiled again.
    """
    from torch._dynamo import convert_frame, eval_frame

    def optimize(*args: Any, **kwargs: Any) -> Any:
        made = own_optimize(*args, **kwargs)
        if kwargs.get("disable"):
            return made
        asked(_backend_name(args[0] if args else kwargs.get("backend", "inductor")), bool(kwargs.get("nopython")))
        # torch returns a null context if the environment or a setting disables compilation.
        return _Uncompiled(called) if isinstance(made, nullcontext) else made

    def from_stance(callback: Any) -> Any:
        if callable(callback):  # None for code that is never compiled
            called()
        return own_from_stance(callback)

    def reasons(*args: Any, **kwargs: Any) -> Any:
        found = own_reasons(*args, **kwargs)
        if found:
            recompiled(str(found[0]))
        return found

    # The replacements above read these names only when they are called.
    own_reasons = convert_frame.get_and_maybe_log_recompilation_reasons
    own_optimize, own_from_stance = torch._dynamo.optimize, eval_frame._callback_from_stance
    with (
        mock.patch.object(torch._dynamo, "optimize", optimize),
        mock.patch.object(convert_frame, "get_and_maybe_log_recompilation_reasons", reasons),
        mock.patch.object(eval_frame, "_callback_from_stance", from_stance),
    ):
        yield


def compile_calls(model: nn.Module, backend: Callable[..., Any]) -> None:
    """Compile a module's calls like `module.compile`, also for torch's own module classes.

    Sizes are static: a call with other sizes is compiled again.
    """
    # Dynamo skips calls of torch's own classes, but not a function of ours that makes such a call.

    def called(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    call: Callable[..., Any] = model._call_impl
    model._compiled_call_impl = torch.compile(called, backend=backend, dynamic=False)


def ahead_of_time(
    compile_graph: Callable[[GraphModule, str], Callable[..., Any]], decompositions: Mapping[Any, Any] | None
) -> Callable[..., Any]:
    """Return a torch.compile backend that differentiates the captured code ahead of time, like "aot_eager".

    `compile_graph(graph, direction)` is called for each graph, with "forward" or "backward", and returns a function
    that runs the graph.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    def compiler(direction: str) -> Callable[..., Any]:
        return lambda module, inputs: make_boxed_func(compile_graph(module, direction))

    backend: Callable[..., Any] = aot_autograd(
        fw_compiler=compiler("forward"),
        bw_compiler=compiler("backward"),
        inference_compiler=compiler("forward"),
        partition_fn=min_cut_rematerialization_partition,
        keep_inference_input_mutations=True,
        decompositions=dict(decompositions) if decompositions else None,
    )
    return backend


def boxed(call: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Mark `call` as taking one list of arguments, which it may empty; torch calls compiled graphs this way."""

    def called(inputs: list[Any]) -> Any:
        return call(inputs)

    called._boxed_call = True  # type: ignore[attr-defined]
    return called


class _Uncompiled(nullcontext[None]):
    """Replaces the result of torch.compile if compilation is disabled: calls `called`, and runs the code unchanged."""

    def __init__(self, called: Callable[[], None]) -> None:
        super().__init__()
        self._called = called

    def __call__(self, code: Any) -> Any:
        # torch.compile takes modules, classes and functions. A null context would return each of them unchanged.
        if isinstance(code, nn.Module):
            code.register_forward_pre_hook(lambda module, args: self._called())
            return code
        if isinstance(code, type):
            self._called()
            return code

        @functools.wraps(code)
        def call(*args: Any, **kwargs: Any) -> Any:
            self._called()
            return code(*args, **kwargs)

        return call


def _backend_name(backend: Any) -> str:
    # torch wraps most backends.
    backend = getattr(backend, "compiler_name", backend)
    return backend if isinstance(backend, str) else getattr(backend, "__name__", type(backend).__name__)


def trace_artifact(name: str, text: str) -> None:
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": "string"},
        payload_fn=lambda: text,
        expect_trace_id=False,
    )
