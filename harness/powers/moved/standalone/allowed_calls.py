"""Decides which operators an archive may contain, and derives facts about a call from the operator's schema.

An archive may be untrusted. Operators that access files, print, resize other tensors' memory or return storages are
refused.
"""

from __future__ import annotations

import importlib
import re
from typing import Any

import torch

from .call_values import hold, leaves

NAMESPACES = ("aten", "prims")
REFUSED = {
    *("from_file", "_print", "save", "load", "set_", "set_data", "record_stream", "resize_", "resize_as_", "warn"),
    *("_resize_output_", "_resize_output", "_foobar", "is_pinned", "pin_memory", "_pin_memory", "_debug_has_internal"),
    *("_backward", "requires_grad_", "retain_grad", "data", "_test_warn_in_autograd", "set", "resize", "resize_as"),
    *("_assert_async", "_functional_assert_async", "_assert_scalar", "_spawn", "sym_constrain_range", "copy_sparse_to"),
    *("_cslt_compress", "_cslt_sparse_mm", "_validate_sparse_coo_tensor_args", "_nested_view_from_buffer"),
}
REFUSED_TYPES = ("Storage", "Stream", "Dimname", "Any", "Dict", "Future", "__torch__")
UNSET = ("empty", "new_empty", "_empty_affine", "_efficientzerotensor")
"""Operators that return uninitialized memory, which cannot be compared."""
OVERWRITES = {"fill_", "zero_", "copy_", "normal_", "uniform_", "random_", "bernoulli_", "exponential_", "geometric_"}
"""Operators that write an argument without reading it. `out=` arguments are never read either."""
OVERWRITES |= {"log_normal_", "cauchy_", "eye", "arange", "randperm"}
"""Operators that do not read the argument that they write; neither does any `out=` argument."""
_NAME = re.compile(r"(aten|prims)\.([A-Za-z_][A-Za-z0-9_]{0,100})\.([A-Za-z_][A-Za-z0-9_]{0,100})")


class MissingError(Exception):
    """This torch does not have the operator or the overload."""


def operator_named(name: Any) -> Any:
    """Return the OpOverload for a name such as `aten.mm.default`.

    Raises RefusedArchiveError if an archive must not contain the operator, and MissingError if this torch does not have
    it.
    """
    match = _NAME.fullmatch(name) if type(name) is str else None
    hold(match is not None, f"{str(name)[:80]!r} is not an operator of {' or '.join(NAMESPACES)}")
    assert match is not None
    space, operator, overload = match.groups()
    hold(operator not in REFUSED, f"operator {name} is not replayed: it has effects beyond its results")
    hold(not operator.startswith("__") and not overload.startswith("__"), f"{name} is not an operator")
    if space == "prims":
        importlib.import_module("torch._prims")  # which defines them
    # The name was checked above, so that this can reach no other attribute of torch.
    packet = getattr(getattr(torch.ops, space), operator, None)
    if not isinstance(packet, torch._ops.OpOverloadPacket):
        raise MissingError(f"this torch has no operator {space}.{operator}")
    found = getattr(packet, overload, None) if overload in packet.overloads() else None
    if not isinstance(found, torch._ops.OpOverload):
        raise MissingError(f"this torch has no overload {overload} of {space}.{operator}")
    hold(is_allowed(found), f"operator {name} is not replayed: it has effects beyond its results")
    return found


def is_allowed(operator: Any) -> bool:
    schema = operator._schema
    types = [str(each.type) for each in (*schema.arguments, *schema.returns)]
    name = schema.name.partition("::")[2]
    return (
        operator.namespace in NAMESPACES
        and name not in REFUSED
        and not any(w in t for t in types for w in REFUSED_TYPES)
    )


def computes(operator: Any) -> bool:
    """Return whether a call computes values: False for views, and for operators that return uninitialized memory."""
    schema = operator._schema
    if schema.name.partition("::")[2].startswith(UNSET) and not operator._overloadname.endswith("out"):
        return False
    # Such a call returns no new values; it counts if it writes.
    if torch.Tag.inplace_view in operator.tags or not schema.returns:
        return bool(written_names(operator))
    # A result that aliases an argument unwritten is a view.
    return any(each.alias_info is None or each.alias_info.is_write for each in schema.returns)


def draws(operator: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in operator.tags


def written_names(operator: Any) -> list[str]:
    return [a.name for a in operator._schema.arguments if a.alias_info is not None and a.alias_info.is_write]


def written(operator: Any, args: Any, kwargs: Any) -> list[Any]:
    names = set(written_names(operator))
    given = [(each.name, value) for each, value in zip(operator._schema.arguments, args, strict=False)] + [
        *kwargs.items()
    ]
    return [leaf for name, value in given if name in names for leaf in leaves(value) if isinstance(leaf, torch.Tensor)]


def overwrites(operator: Any) -> bool:
    """Return whether a call writes its arguments without reading their earlier content."""
    arguments = operator._schema.arguments
    is_out = any(each.is_out for each in arguments)
    return is_out or operator._schema.name.partition("::")[2] in OVERWRITES


def outcome(operator: Any, result: Any, args: Any, kwargs: Any) -> list[Any]:
    """Return all values that a call computes: its results, then the arguments that it writes but does not return."""
    found = leaves(result)
    # In-place operators return what they write.
    seen = {id(each) for each in found}
    return [*found, *(each for each in written(operator, args, kwargs) if id(each) not in seen)]
