"""Builds the module that a case's model describes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import nn

from bitproof.harness.case import Model
from bitproof.harness.errors import CaseError
from bitproof.reference.models import deepseek_v3, llama3, qwen3_moe
from bitproof.reference.models.sizes import resize


class Family(NamedTuple):
    """A model architecture: its module class, and its configurations by name (`flavors`)."""

    module: type[nn.Module]
    flavors: Mapping[str, Any]


FAMILIES: dict[str, Family] = {
    "deepseek_v3": Family(deepseek_v3.DeepSeekV3, deepseek_v3.FLAVORS),
    "llama3": Family(llama3.Llama3, llama3.FLAVORS),
    "qwen3_moe": Family(qwen3_moe.Qwen3MoE, qwen3_moe.FLAVORS),
}


def model_config(model: Model) -> Any:
    """Return the configuration of a case's model: that of its family and flavor, with the sizes that the case states.

    Raises CaseError for an unknown name, and for a size that the family lacks or cannot have.
    """
    family = _family(model)
    if model.flavor not in family.flavors:
        raise CaseError(
            f"unknown flavor of {model.family}: {model.flavor!r}", expected="one of " + ", ".join(family.flavors)
        )
    return resize(family.flavors[model.flavor], model)


def build_model(model: Model) -> nn.Module:
    """Build the module on the default device, in float32.

    Its values are not final: `reference.init.initialize` writes them. Raises CaseError for an unknown family or flavor,
    and for impossible sizes.
    """
    config = model_config(model)
    return _family(model).module(config)


def _family(model: Model) -> Family:
    if model.family not in FAMILIES:
        raise CaseError(f"unknown model family: {model.family!r}", expected="one of " + ", ".join(FAMILIES))
    return FAMILIES[model.family]
