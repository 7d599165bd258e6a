"""Runs a system in float64, to separate a small defect from rounding.

Rounding in float64 is 2^29 times smaller than in float32, but a wrong formula remains as wrong as before. Example: the
effect on a gradient, relative to its norm,

    in float32    in float64
    3e-7          3e-7          of another eps of a norm, 1e-6 instead of 1e-5
    2e-7          4e-16         of another order of sums

Every operator call is changed, from the time before the system is made:

1. Each dtype in a call (`x.float()`, `torch.zeros(3, dtype=torch.bfloat16)`) becomes float64, and so does the default
   dtype. complex64 becomes complex128. float8 stays, as its scales mean nothing in float64.
2. Random numbers are drawn in float32 and then widened, so weights and masks are those of the plain run.
3. A tensor from elsewhere (a file, NumPy, a module that was imported earlier) is widened when it is read. Its numbers
   may have been rounded in one of the two systems only. `Widened.narrow` names the first such call.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bitproof.harness.torch_operators import overload_of, schema_of
from bitproof.harness.within_user_code import refusing, theirs

if TYPE_CHECKING:
    import torch

_SENT = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "fsdp")
"""Namespaces of collectives. Their arguments keep their dtypes, because this rank or another rank writes into them."""


@dataclass
class Widened:
    """The finding of a run in float64.

    `narrow` is the first call that read numbers that may be rounded, such as "aten.mul.Tensor (train.py:12)"; None if
    there was none.
    """

    narrow: str | None = None


@contextmanager
def computed_in_float64(found: Widened | None) -> Iterator[None]:
    """Context in which this thread computes in float64; no effect if `found` is None.

    The first call that reads numbers that may be rounded is stored in `found.narrow`.
    """
    if found is None:
        yield
        return
    import torch
    from torch.distributed.tensor import DTensor

    from bitproof.harness.graph.origin import innermost_user_line
    from bitproof.harness.torch_compat import OpOverload, TorchDispatchMode, tree_leaves, tree_map_only

    # `found` is not None here, but the type checker forgets that within the class below.
    noted = found

    class Widening(TorchDispatchMode):
        supports_higher_order_operators = True

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            given = (args, kwargs or {})
            # `x.view(dtype)` reinterprets the bits of x, so its dtype is not a request to compute in another.
            if function is torch.ops.aten.view.dtype or not isinstance(function, OpOverload):
                return function(*given[0], **given[1])
            with refusing():
                torch.set_default_dtype(torch.float64)  # user code may have set another
                asked = tree_map_only(torch.dtype, _wide_dtype, given)
                is_asked = any(x is not y for x, y in zip(tree_leaves(given), tree_leaves(asked), strict=True))
                if DTensor in types:  # it makes plain calls of this one, which come here
                    return _call_in_mode(self, function, asked) if is_asked else NotImplemented
                if torch.Tag.nondeterministic_seeded in function.tags:
                    return _draw(function, *asked)
                args, kwargs = asked
                if function.namespace not in _SENT:
                    args, kwargs, is_rounded = _widen_arguments(function, args, kwargs)
                    if is_rounded and not noted.narrow:
                        line = innermost_user_line(sys._getframe(1))
                        noted.narrow = f"{function}{f' ({line})' if line else ''}"
                return theirs(function, *args, **kwargs)

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with Widening():  # type: ignore[no-untyped-call]
            yield
    finally:
        torch.set_default_dtype(before)


def _call_in_mode(mode: Any, function: Any, asked: tuple[Any, Any]) -> Any:
    # A mode is off within its own dispatch. It is entered again to see the plain calls that DTensor makes.
    with mode:
        return theirs(function, *asked[0], **asked[1])


def _wide_dtype(x: torch.dtype) -> torch.dtype:
    import torch

    if x in (torch.float32, torch.float16, torch.bfloat16):
        return torch.float64
    return torch.complex128 if x in (torch.complex64, torch.complex32) else x


def _is_rounded(x: Any) -> bool:
    import torch

    from bitproof.harness.torch_compat import FakeTensor

    if not isinstance(x, torch.Tensor) or isinstance(x, FakeTensor) or x.is_meta or not x.numel():
        return False
    if x.dtype != torch.float32:
        return (x.is_floating_point() or x.is_complex()) and x.dtype not in (torch.float64, torch.complex128)
    # A float32 number that bfloat16 can also hold, such as 0.5, has few digits, so it is not the result of rounding.
    return not torch.equal(x.to(torch.bfloat16).to(x.dtype).nan_to_num(), x.nan_to_num())


def _widen_arguments(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], bool]:
    """Return three values: a call's args and kwargs, after widening narrow tensors in them, and whether the call reads
    numbers that may be rounded.

    Arguments that the call writes, or returns views of, are not widened.
    """
    import torch

    from bitproof.harness.torch_compat import tree_leaves, tree_map_only

    # A widened copy of an argument that the call writes would lose the write.
    aliases = {argument.name: argument.alias_info for argument in schema_of(function).arguments}
    given = dict(zip(aliases, args, strict=False)) | kwargs
    found = {
        name: x if aliases[name] else tree_map_only(torch.Tensor, lambda x: x.to(_wide_dtype(x.dtype)), x)
        for name, x in given.items()
    }
    # A call does not read an argument that it only returns a view of.
    read = [x for name, x in given.items() if aliases[name] is None or aliases[name].is_write]
    is_rounded = any(map(_is_rounded, tree_leaves(read)))
    return (
        tuple(found[name] for name in given if name not in kwargs),
        {name: found[name] for name in kwargs},
        is_rounded,
    )


def _draw(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Draw random numbers in float32, as in a plain run, and widen them. Calls that draw no floats run unchanged."""
    import torch

    from bitproof.harness.graph.operators import row_of

    first = args[0] if args and isinstance(args[0], torch.Tensor) else None
    # Calls that write random numbers into their first argument, such as `normal_`.
    if first is not None and overload_of(function) in row_of(function).overwrites:
        if first.dtype != torch.float64:
            return theirs(function, *args, **kwargs)
        return first.copy_(theirs(function, torch.empty_like(first, dtype=torch.float32), *args[1:], **kwargs))
    # These compare random numbers with probabilities. In float64 they would choose other elements than the plain run.
    if schema_of(function).name in ("aten::bernoulli", "aten::multinomial"):
        found = theirs(function, args[0].float(), *args[1:], **kwargs)
        return found.double() if found.is_floating_point() else found
    asked = kwargs.get("dtype") or (first.dtype if first is not None else torch.float64)
    # Random integers and permutations stay integers, even if the dtype asked for is float64.
    is_float = asked == torch.float64 and not schema_of(function).name.startswith(("aten::randint", "aten::randperm"))
    if is_float and any(argument.name == "dtype" for argument in schema_of(function).arguments):
        return theirs(function, *args, **{**kwargs, "dtype": torch.float32}).double()
    return theirs(function, *args, **kwargs)
