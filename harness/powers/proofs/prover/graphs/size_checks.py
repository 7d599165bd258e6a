"""Checks shapes for operators that do not check their shapes themselves.

With mismatched shapes, such an operator reads memory outside its tensors or aborts. Calls from autograd have matching
shapes, but a graph from elsewhere may not. `index` is checked for another reason: for some indices, its fake result has
a wrong layout.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from bitproof.harness.powers.proofs.prover import known_operators as known


def sizes_misfit(name: str, given: Mapping[str, Any]) -> bool:
    """Return whether a call has mismatched shapes that its operator does not reject.

    For example, `native_layer_norm_backward` needs a `grad_out` with the shape of `input`. For `index`, return whether
    its fake result may have a wrong layout.

    `given` has the arguments by name, with fake tensors.
    """
    # A nested graph's calls are checked by name alone, without arguments.
    if not given:
        return False
    if names := known.SAME_SHAPE.get(name):
        return len({_sizes(given[x]) for x in names}) > 1
    if (dims := known.SAME_BATCH.get(name)) is not None:
        return len({_sizes(x)[:-dims] for x in given.values() if isinstance(x, Tensor)}) > 1
    match name.split(".")[1]:
        case "native_batch_norm_backward":
            return _misfits_batch_norm(given)
        case "native_layer_norm_backward":
            return _misfits_layer_norm(given)
        case "_scaled_dot_product_flash_attention_for_cpu" | "_scaled_dot_product_flash_attention_for_cpu_backward":
            return _misfits_attention(given)
        case "index" | "_unsafe_index":
            return _misfits_index(given["self"], given["indices"])
        case "bincount":
            return given.get("weights") is not None and 0 in given["self"].shape
    return False


def _misfits_index(x: Tensor, indices: Sequence[Tensor | None]) -> bool:
    """Return whether the fake result of `index` may have a wrong layout.

    The kernel orders the dims of the result by the strides of `x` and of the indices, but the fake operator only by
    `x`.
    """
    if any(index is not None and (index.dim() == 0 or not _is_in_order(_dims_of(index))) for index in indices):
        return True
    own = _dims_of(x)
    taken = [dim for dim, index in enumerate(indices) if index is not None]
    left = [dim for dim in range(x.dim()) if dim not in taken]
    # To the kernel an index has size 1 in every dim of `x` that it does not index. So it may reorder dims of size 1.
    single = [dim for dim in left if dim < taken[0] and isinstance(own[dim][0], int) and own[dim][0] == 1]
    return any(not _is_in_order([own[dim], own[after]]) for dim in single for after in left if after > dim)


def _dims_of(x: Tensor) -> list[tuple[Any, Any]]:
    # (size, stride) of each dim
    return [*zip(x.shape, x.stride(), strict=True)]


def _is_in_order(dims: Sequence[tuple[Any, Any]]) -> bool:
    """Return whether torch keeps dims in their order when it allocates a result. Each dim is (size, stride).

    - Each stride must be larger than all later strides. It may equal a later stride if the size there is not larger.
    - Dims of stride 0 are skipped.
    - False if a stride, or a size other than the first, depends on data.
    """
    if len(dims) == 1:
        return True
    if not all(isinstance(n, int) for n in (*(n for n, _ in dims[1:]), *(s for _, s in dims))):
        return False
    held = [(n, s) for n, s in dims if s != 0]
    return 0 in [n for n, _ in dims[1:]] or all(
        s > inner or (s == inner and (m == 1 or (isinstance(n, int) and m <= n)))
        for (n, s), (m, inner) in itertools.combinations(held, 2)
    )


def _sizes(x: Tensor) -> tuple[str, ...]:
    # As text, because comparing data-dependent sizes themselves would fail.
    return tuple(str(n) for n in x.shape)


def _misfits_batch_norm(given: Mapping[str, Any]) -> bool:
    # Statistics and weights must have an element per channel, and the gradient must have the input's shape.
    read = ("save_mean", "save_invstd") if given["train"] else known.STATISTICS
    channels = _sizes(given["input"])[1:2]
    statistics = [given.get(x) for x in read]
    others = [x for x in (*statistics, given.get("weight")) if x is not None]
    return None in statistics or any(_sizes(x) != channels for x in others) or not _alike(given, "grad_out", "input")


def _misfits_layer_norm(given: Mapping[str, Any]) -> bool:
    dims = len(given["normalized_shape"])
    # The statistics have the normalized dims, too, each of size 1.
    counted = (*_sizes(given["input"])[:-dims], *["1"] * dims)
    return not _alike(given, "grad_out", "input") or any(_sizes(given[x]) != counted for x in ("mean", "rstd"))


def _misfits_attention(given: Mapping[str, Any]) -> bool:
    # The query is (batch, head, row, feature). Key and value have the same sizes, except for the number of rows. The
    # mask must expand to (batch, head, query row, key row).
    query, key, mask = _sizes(given["query"]), _sizes(given["key"]), given.get("attn_mask")
    fits = (
        len(query) == len(key) == 4 and (*query[:2], query[3]) == (*key[:2], key[3]) and _alike(given, "key", "value")
    )
    if "grad_out" in given:
        fits = fits and _alike(given, "grad_out", "out", "query") and _sizes(given["logsumexp"]) == query[:3]
    return not fits or (mask is not None and not _expands(_sizes(mask), (*query[:3], key[2])))


def _expands(sizes: Sequence[str], to: Sequence[str]) -> bool:
    return len(sizes) in (2, 4) and all(n in ("1", m) for n, m in zip(sizes, to[-len(sizes) :], strict=True))


def _alike(given: Mapping[str, Any], *names: str) -> bool:
    return len({_sizes(given[x]) for x in names}) == 1
