"""Changes the configuration of a model's flavor to the sizes that a case states."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bitproof.harness.case import Model
from bitproof.harness.errors import CaseError


def sizes_of(config: Any) -> dict[str, int]:
    """Return a configuration's sizes by their names in `case.Model`, such as {"layers": 3, "dim": 64, "heads": 4}."""
    sizes = {"layers": config.num_layers, "dim": config.dim, "heads": config.attention.num_heads}
    if hasattr(config, "num_dense_layers"):
        sizes["dense_layers"] = config.num_dense_layers
    if hasattr(config, "moe"):
        sizes |= {"experts": config.moe.routing.num_experts, "top_k": config.moe.routing.top_k}
    return sizes


def resize(config: Any, model: Model) -> Any:
    """Return `config` with the sizes that `model` states; unchanged if it states none.

    Raises CaseError for a size that the family lacks, for contradictory sizes, and for a `dim` that makes hidden dims
    fractional.
    """
    sizes, known = model.sizes, sizes_of(config)
    if lacking := sizes.keys() - known.keys():
        raise CaseError(
            f"{model.family} has no {' and no '.join(sorted(lacking))}",
            expected=", ".join(sorted(known)),
            found=", ".join(f"{name}={sizes[name]}" for name in sorted(lacking)),
        )
    changes: dict[str, Any] = {}
    if "layers" in sizes:
        changes["num_layers"] = sizes["layers"]
    if "dense_layers" in known:
        # Fewer layers than the flavor's dense layers: then all are dense.
        dense = min(known["dense_layers"], sizes.get("layers", known["layers"]))
        changes["num_dense_layers"] = sizes.get("dense_layers", dense)
    if "heads" in sizes:
        changes["attention"] = _with_heads(config.attention, sizes["heads"])
    if "experts" in known:
        routing = {"num_experts": sizes.get("experts"), "top_k": sizes.get("top_k")}
        given = {name: size for name, size in routing.items() if size is not None}
        changes["moe"] = replace(config.moe, routing=replace(config.moe.routing, **given))
    if model.capacity is not None:
        if "experts" not in known:
            raise CaseError(
                f"{model.family} has no experts, and so no capacity",
                expected="capacity=None",
                found=f"capacity={model.capacity:g}",
            )
        changes["moe"] = replace(changes["moe"], capacity=model.capacity)
    if "dim" in sizes:
        changes |= _with_dim(config, changes, sizes["dim"])
    return replace(config, **changes) if sizes or model.capacity is not None else config


def _with_heads(attention: Any, heads: int) -> Any:
    if not hasattr(attention, "num_kv_heads"):
        return replace(attention, num_heads=heads)
    # Key/value heads are scaled in proportion.
    num_kv_heads = max(1, heads * attention.num_kv_heads // attention.num_heads)
    return replace(attention, num_heads=heads, num_kv_heads=num_kv_heads)


def _with_dim(config: Any, changes: dict[str, Any], dim: int) -> dict[str, Any]:
    """Return field -> new value for the model dim `dim`: the dim itself, and every hidden dim scaled in proportion.

    `changes` are the earlier changes to the same config. Raises CaseError if a scaled hidden dim is not a whole number.
    """

    def hidden(extent: int) -> int:
        if extent * dim % config.dim:
            raise CaseError(
                "a hidden dim cannot follow the model dim in proportion",
                expected=f"a dim for which dim x {extent} / {config.dim} is a whole number",
                found=f"dim={dim}",
            )
        return extent * dim // config.dim

    found: dict[str, Any] = {"dim": dim}
    found |= {
        name: hidden(getattr(config, name)) for name in ("hidden_dim", "dense_hidden_dim") if hasattr(config, name)
    }
    if "moe" in changes:
        found["moe"] = replace(changes["moe"], hidden_dim=hidden(config.moe.hidden_dim))
    return found
