"""Names a model's parameters and buffers without the names that wrappers add.

For example, torch.compile stores the wrapped module as its child `_orig_mod`. The parameter `_orig_mod.weight` is then
named `weight`, unless the wrapper has its own `weight`: no two tensors get the same name.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor, nn

_WRAPPED = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


def bare_tensors(model: nn.Module, kind: Literal["parameters", "buffers"]) -> Iterator[tuple[str, Tensor]]:
    """Yield (name without wrappers, tensor) for each parameter or buffer of a model, in the model's order.

    A tensor with several names is yielded once.
    """
    left_out: dict[int, set[str]] = {}
    _names_of(model, left_out)
    bare = {"": ""}
    seen: set[int] = set()
    for path, module in model.named_modules():
        if path:
            parent, _, name = path.rpartition(".")
            # Parents come before their children here, so their bare names are known.
            is_left_out = name in left_out[id(model.get_submodule(parent))]
            bare[path] = bare[parent] if is_left_out else f"{bare[parent]}.{name}".lstrip(".")
        for name, tensor in getattr(module, f"named_{kind}")(recurse=False):
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield f"{bare[path]}.{name}".lstrip("."), tensor


def _names_of(module: nn.Module, left_out: dict[int, set[str]]) -> set[str]:
    """Return the names of a module's tensors and children, with each wrapper replaced by the names inside it.

    A wrapper is kept if a name inside it is used outside, too. `left_out` collects the replaced names: module id ->
    names.
    """
    left_out[id(module)] = set()
    tensors = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
    children = dict(module.named_children())
    names = {name for name, _ in tensors} | children.keys()
    for name, child in children.items():
        if id(child) in left_out:  # the child was found before at another place, and has its name there
            continue
        inner = _names_of(child, left_out)
        if name in _WRAPPED and inner.isdisjoint(names - {name}):
            left_out[id(module)].add(name)
            names = (names - {name}) | inner
    return names
