"""Name a model's parameters and buffers as if no wrapper were around its modules. No two tensors get the same name.

For example, torch.compile stores the wrapped module as the child `_orig_mod`.

- `_orig_mod.weight` is called `weight`.
- It keeps its name if the wrapper has a `weight` of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor, nn

_WRAPPED = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


def bare_tensors(model: nn.Module, kind: Literal["parameters", "buffers"]) -> Iterator[tuple[str, Tensor]]:
    """Yield each parameter or buffer of a model with its bare name: its name without the names that wrappers add.

    Each tensor is yielded once, in the model's order.
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
    """The names of a module's tensors and children, without wrappers around them.

    A wrapped child is replaced by the names inside it, unless two things would have the same name. `left_out` collects
    the replaced names, by module.
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
