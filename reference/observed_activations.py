"""Observes activations of the eager step: the outputs of chosen modules, and the gradients of these outputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from bitproof.harness.case import Boundary, Kind, observed_modules
from bitproof.harness.torch_compat import FakeTensor, tree_leaves
from bitproof.reference.chunking import running_chunk

Observe = Callable[[Kind, str, Tensor], None]


class Activations:
    """The modules of a model that a case observes. Raises CaseError for a pattern that matches no module."""

    def __init__(self, model: nn.Module, patterns: Sequence[str]) -> None:
        names = observed_modules(patterns, [name for name, _ in model.named_modules()]) if patterns else []
        self._modules = {name: model.get_submodule(name) for name in names}

    @contextmanager
    def shown_to(self, observe: Observe) -> Iterator[None]:
        """Context in which `observe` gets each activation and its gradient, as soon as they are computed.

        An activation that requires no gradient has none. The hooks only read, so the computation stays the same.
        """
        calls: Counter[tuple[str, int | None]] = Counter()
        hooks = [module.register_forward_hook(_hook(name, calls, observe)) for name, module in self._modules.items()]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def _hook(name: str, calls: Counter[tuple[str, int | None]], observe: Observe) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        # An index counts all leaves of the output, including those that are no tensors.
        tensors = [(index, x) for index, x in enumerate(tree_leaves(output)) if isinstance(x, Tensor)]
        if any(isinstance(x, FakeTensor) for _, x in tensors):  # so that a trace does not see the hook
            return
        chunk = running_chunk()
        # Each chunk counts its own calls, so both chunks of a call have the same number.
        earlier = calls[name, chunk]
        calls[name, chunk] += 1
        for index, tensor in tensors:
            place = None if tensor is output else index
            observe("activation", Boundary(name, "forward", place, earlier, chunk).name, tensor.detach())
            if tensor.requires_grad:
                tensor.register_hook(_gradient_hook(Boundary(name, "backward", place, earlier, chunk), observe))

    return hook


def _gradient_hook(boundary: Boundary, observe: Observe) -> Callable[[Tensor], None]:
    def hook(gradient: Tensor) -> None:
        observe("activation", boundary.name, gradient.detach())

    return hook
