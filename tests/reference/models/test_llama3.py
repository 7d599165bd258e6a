"""Llama 3's tree: every layer dense, no state but parameters, heads shared in groups."""

from __future__ import annotations

from bitproof.harness.case import Model
from bitproof.reference.models import build_model, model_config


def test_every_layer_is_dense_and_nothing_but_parameters_is_kept() -> None:
    tiny = build_model(Model(family="llama3"))
    assert {name.split(".")[2] for name in tiny.state_dict() if name.startswith("layers.")} == {
        "attention_norm",
        "attention",
        "ffn_norm",
        "feed_forward",
    }
    assert tiny.state_dict().keys() == dict(tiny.named_parameters()).keys()


def test_every_flavor_shares_key_value_heads_and_stretches_its_frequencies() -> None:
    for flavor in ("tiny", "debugmodel", "8B", "70B", "405B"):
        attention = model_config(Model(family="llama3", flavor=flavor)).attention
        assert attention.num_kv_heads < attention.num_heads
        assert attention.rope.scaling.factor == 8.0
        assert not attention.qk_norm
