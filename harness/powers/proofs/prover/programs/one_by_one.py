"""Traces operators over lists of tensors as loops over single tensors, as torch's CPU implementation runs them.

For example, `torch._foreach_add_(xs, ys)` becomes `x.add_(y)` for each pair. On other devices, operators stay
unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.fx import GraphModule

from bitproof.harness.torch_compat import OpOverload, TorchDispatchMode

PREFIX = "_foreach_"
FUNCTIONS: dict[str, Callable[..., Any]] = {
    name: getattr(torch.Tensor, name)
    for stem in ("add", "sub", "mul", "div", "lerp", "addcmul", "addcdiv", "sqrt", "neg", "reciprocal", "abs", "sign")
    for name in (stem, f"{stem}_")
}
FUNCTIONS |= {"zero_": torch.Tensor.zero_, "copy_": torch.Tensor.copy_, "norm": torch.linalg.vector_norm}
"""Maps the name of an operator over lists, without PREFIX, to the function to call for each tensor.

Other operators over lists stay unchanged.
"""

_BY_KEYWORD = {"addcmul": "value", "addcdiv": "value", "addcmul_": "value", "addcdiv_": "value"}
"""Maps a function that takes its number by keyword to this keyword.

The operator over lists takes it as last argument.
"""


class _OneByOne(TorchDispatchMode):
    # Otherwise torch refuses higher-order operators under this mode.
    supports_higher_order_operators = True

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = str(func).partition(".")[2].partition(".")[0].removeprefix(PREFIX)
        is_list = isinstance(func, OpOverload) and str(func).startswith(f"aten.{PREFIX}")
        if not is_list or name not in FUNCTIONS or any(x.device.type != "cpu" for x in args[0]):
            return func(*args, **kwargs)
        found = [self._one(name, place, args, kwargs) for place in range(len(args[0]))]
        # In-place operators over lists return nothing.
        return None if name.endswith("_") else found

    def _one(self, name: str, place: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        own = [x[place] if isinstance(x, list | tuple) else x for x in args]
        if name in _BY_KEYWORD and len(own) > 3:
            kwargs = {**kwargs, _BY_KEYWORD[name]: own.pop()}
        return FUNCTIONS[name](*own, **kwargs)


def one_by_one() -> AbstractContextManager[Any]:
    return _OneByOne()  # type: ignore[no-untyped-call]


def without_regions(module: GraphModule) -> GraphModule:
    """Remove the profiler ranges of optimizers from a traced graph in place, and return the graph.

    The ranges compute nothing.
    """
    # The end of a range reads its start, so ends are erased first.
    for name in ("_record_function_exit", "_record_function_enter_new"):
        for node in [node for node in module.graph.nodes if getattr(node.target, "namespace", None) == "profiler"]:
            if str(node.target).split(".")[1] == name and not node.users:
                module.graph.erase_node(node)
    return module
