"""Trainers of five frameworks with one defect each, none in a line of the glue: `defects.py:mixtral__no_norm`.

As tests/benchmarks/defective_trainers.py, whose table tests/benchmarks/bench_blame.py reads in the same form. A defect
is put in when the trainer is built: into its model, its optimizer, or the framework's own functions.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import accelerate
import torch
from lightning.pytorch.loops.optimization import automatic
from lightning.pytorch.plugins.precision import Precision
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import stage as pipelining_stage
from torch.nn import GELU
from torch.nn.parallel import DistributedDataParallel
from transformers.loss import loss_utils
from transformers.models.llama import modeling_llama

sys.path[:0] = [folder for folder in map(str, (Path(__file__).parent, Path(__file__).parents[2]))]
import accelerated  # noqa: E402
import hf  # noqa: E402
import hf_trainer  # noqa: E402
import lit  # noqa: E402
import titan  # noqa: E402

from bitproof.builtin_cases.examples import pipelined  # noqa: E402
from bitproof.harness.case.case_file import read_case  # noqa: E402
from tests.benchmarks.defective_trainers import Defect, void  # noqa: E402

STEPS = 1
PRELOAD = ("transformers.trainer", "lightning", "accelerate", "torch.distributed.pipelining")
SIZES = {
    "Llama": {},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16},
}


def of_model(factory: Callable[..., Any], name: str) -> Callable[..., Any]:
    """A factory of transformers' models, for one of them."""
    return lambda case, mesh: factory(replace(case, options={"model": name, "sizes": SIZES[name]}), mesh)


def of_titan(case_file: str) -> Callable[..., Any]:
    """torchtitan's eager trainer of a case."""
    options = read_case(Path(__file__).with_name(case_file)).options
    return lambda case, mesh: titan.reference(replace(case, options=options), mesh)


# None has the name of a module that this file imports: that would be found in its place.
KINDS: dict[str, Callable[..., Any]] = {
    "llama": of_model(hf.plain, "Llama"),
    "mixtral": of_model(hf.plain, "Mixtral"),
    "qwen3": of_model(hf.plain, "Qwen3Moe"),
    "trainer": of_model(hf_trainer.plain, "Llama"),
    "accelerator": accelerated.plain,
    "lightning": lit.plain,
    "accumulating": lit.accumulating,
    "pipelining": pipelined.gpipe,
    "deepseek": of_titan("titan_unchunked.json"),
    "titan_llama": of_titan("titan_llama.json"),
}


def setting(module: str, name: str, value: Any) -> Callable[..., None]:
    """A module's other setting."""
    return lambda watched, rank: setattr(watched.model.get_submodule(module), name, value)


def group(**settings: Any) -> Callable[..., None]:
    """The optimizer's other settings, of one that the framework has built."""
    return lambda watched, rank: watched.watched_optimizers[0].param_groups[0].update(settings)


def patched(owner: Any, name: str, change: Callable[..., Any]) -> Callable[..., None]:
    """A function of the framework's, changed: `change` is handed the one that it has."""
    return lambda watched, rank: setattr(owner, name, partial(change, getattr(owner, name)))


def in_class(owner: type, name: str, change: Callable[..., Any]) -> Callable[..., None]:
    """A method of the framework's, changed: `change` is handed the one that it has, then its arguments."""

    def put_in(watched: Any, rank: int) -> None:
        own = getattr(owner, name)
        setattr(owner, name, lambda *args, **kwargs: change(own, *args, **kwargs))

    return put_in


def output(module: str, change: Callable[[Any], Any], rank: int | None = None) -> Callable[..., None]:
    """What a module returns, changed, on one rank or on all."""

    def put_in(watched: Any, here: int) -> None:
        if rank in (None, here):
            watched.model.get_submodule(module).register_forward_hook(lambda _, args, result: change(result))

    return put_in


def divided_by(factor: float) -> Callable[..., None]:
    """FSDP2 divides gradients by another number than that of the ranks."""

    def put_in(watched: Any, rank: int) -> None:
        for module in watched.model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(factor)
                module.set_force_sum_reduction_for_comms(True)  # gloo lacks another

    return put_in


def with_gradient(x: Any, change: Callable[[Any], Any]) -> Any:
    """The same value, whose gradient is changed."""
    x = x.view_as(x)
    x.register_hook(change)
    return x


def rotated_otherwise(own: Any, x: Any) -> Any:
    """The two halves with the other sign."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((second, -first), dim=-1)


def not_synchronized(own: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Forward as if gradients were never to be summed over ranks: it is then that the wrapper decides."""
    self.require_backward_grad_sync = False
    return own(self, *args, **kwargs)


FORWARD, BACKWARD, UPDATE = "forward", "backward", "update"
CLIPPING = ("mul", "_foreach_mul_", "linalg_vector_norm", "_foreach_norm", "div", "add", "reciprocal")

DEFECTS: dict[tuple[str, str], Defect] = {
    ("llama", "rotation"): Defect(
        patched(modeling_llama, "rotate_half", rotated_otherwise), "model.layers.0.self_attn", FORWARD, ("neg", "cat")
    ),
    ("llama", "eps"): Defect(
        setting("model.layers.1.input_layernorm", "variance_epsilon", 1e-4),
        "model.layers.1.input_layernorm",
        FORWARD,
        ("add",),
    ),
    ("llama", "activation"): Defect(
        setting("model.layers.0.mlp", "act_fn", GELU()), "model.layers.0.mlp.act_fn", FORWARD, ("gelu", "silu")
    ),
    ("llama", "scale"): Defect(
        setting("model.layers.1.self_attn", "scaling", 0.26),
        "model.layers.1.self_attn",
        FORWARD,
        ("_scaled_dot_product", "mul"),
    ),
    ("llama", "decay"): Defect(group(weight_decay=0.3), None, UPDATE, ("mul_",)),
    ("llama", "divided"): Defect(divided_by(3.0), "model.layers.1", BACKWARD, ("_reduce_scatter_base_", "div")),
    ("mixtral", "router"): Defect(
        output("model.layers.1.mlp.gate", lambda r: (r[0], r[1] * 1.01, r[2])),
        "model.layers.1.mlp.gate",
        FORWARD,
        ("mul",),
    ),
    ("mixtral", "on_rank_1"): Defect(
        output("model.layers.0.post_attention_layernorm", lambda x: x * 1.001, rank=1),
        "model.layers.0.post_attention_layernorm",
        FORWARD,
        ("mul",),
        1,
    ),
    ("qwen3", "head_norm"): Defect(
        setting("model.layers.0.self_attn.q_norm", "variance_epsilon", 1e-3),
        "model.layers.0.self_attn.q_norm",
        FORWARD,
        ("add",),
    ),
    ("trainer", "loss"): Defect(
        patched(loss_utils, "fixed_cross_entropy", lambda own, *args, **kwargs: own(*args, **kwargs) * 1.01),
        "",
        FORWARD,
        ("mul",),
    ),
    ("trainer", "clipping"): Defect(
        in_class(
            accelerate.Accelerator,
            "clip_grad_norm_",
            lambda own, self, parameters, max_norm, norm_type=2: own(self, parameters, max_norm / 10, norm_type),
        ),
        None,
        UPDATE,
        CLIPPING,
    ),
    ("accelerator", "not_divided"): Defect(
        in_class(accelerate.Accelerator, "backward", lambda own, self, loss, **kwargs: loss.backward(**kwargs)),
        "",
        FORWARD,
        ("div",),
    ),
    ("accelerator", "not_summed"): Defect(
        in_class(DistributedDataParallel, "forward", not_synchronized), None, BACKWARD, ("allreduce_", "div")
    ),
    ("lightning", "clipping"): Defect(
        in_class(
            Precision,
            "clip_grad_by_norm",
            lambda own, self, optimizer, clip_val: own(self, optimizer, clip_val / 10),
        ),
        None,
        UPDATE,
        CLIPPING,
    ),
    ("accumulating", "not_divided"): Defect(
        patched(
            automatic.ClosureResult,
            "from_training_step_output",
            lambda own, result, normalize=1: own(result, 1),
        ),
        "",
        FORWARD,
        ("div",),
    ),
    ("pipelining", "sends_rounded"): Defect(
        output("layer7", lambda x: x.bfloat16().float(), rank=0), "layer7", FORWARD, ("_to_copy",), 0
    ),
    ("pipelining", "not_scaled"): Defect(
        in_class(pipelining_stage._PipelineStageBase, "scale_grads", lambda own, self, factor: None),
        None,
        UPDATE,  # it runs after the last backward, and reads gradients, as clipping does
        ("div_",),
    ),
    ("deepseek", "route_scale"): Defect(
        setting("layers.1.moe.router", "route_scale", 1.01), "layers.1.moe.router", FORWARD, ("mul",)
    ),
    ("deepseek", "eps"): Defect(
        setting("layers.0.attention_norm", "eps", 1e-3),
        "layers.0.attention_norm",
        FORWARD,
        ("_fused_rms_norm", "rms_norm", "add"),
    ),
    ("titan_llama", "beta"): Defect(
        group(betas=(0.8, 0.95)), None, UPDATE, ("lerp_", "mul_", "_foreach_lerp_", "_single_tensor")
    ),
}


DEFECTS |= {
    ("llama", "positions"): Defect(
        setting("model.rotary_emb", "attention_scaling", 1.01), "model.rotary_emb", FORWARD, ("mul",)
    ),
    ("llama", "other_sequence"): Defect(
        output("model.layers.0.mlp", lambda x: x.flip(0)), "model.layers.0.mlp", FORWARD, ("flip",)
    ),
    ("qwen3", "weights_not_normalized"): Defect(
        # One line that only the candidate runs: it sums the weights, and divides them.
        setting("model.layers.0.mlp.gate", "norm_topk_prob", True),
        "model.layers.0.mlp.gate",
        FORWARD,
        ("sum", "div"),
    ),
    ("mixtral", "one_expert"): Defect(
        setting("model.layers.0.mlp.gate", "top_k", 1), "model.layers.0.mlp.gate", FORWARD, ("topk",)
    ),
    ("trainer", "frozen"): Defect(
        lambda watched, rank: void(
            watched.model.get_parameter("model.layers.1.mlp.down_proj.weight").requires_grad_(False)
        ),
        "model.layers.1.mlp.down_proj",
        BACKWARD,
        ("mm", "t", "transpose"),
    ),
    ("trainer", "norm_in_bfloat16"): Defect(
        output("model.norm", lambda x: x.bfloat16().float()), "model.norm", FORWARD, ("_to_copy",)
    ),
    ("accelerator", "clamped"): Defect(output("2", lambda x: x.clamp(-0.5, 0.5)), "2", FORWARD, ("clamp",)),
    ("lightning", "decay"): Defect(
        in_class(
            lit.Model,
            "configure_optimizers",
            lambda own, self: torch.optim.AdamW(self.parameters(), lr=1e-3, weight_decay=0.3, foreach=self.foreach),
        ),
        None,
        UPDATE,
        ("mul_",),
    ),
    ("pipelining", "gradient_rounded"): Defect(
        output("layer7", lambda x: with_gradient(x, lambda g: g.bfloat16().float()), rank=0),
        "layer7",
        BACKWARD,
        ("_to_copy",),
        0,
    ),
    ("deepseek", "attention_scale"): Defect(
        setting("layers.0.attention", "softmax_scale", 0.1),
        "layers.0.attention.inner_attention",
        FORWARD,
        ("_scaled_dot_product", "mul"),
    ),
    ("titan_llama", "last_norm"): Defect(
        setting("norm", "eps", 1e-2), "norm", FORWARD, ("_fused_rms_norm", "rms_norm", "add")
    ),
    ("titan_llama", "eps"): Defect(
        group(eps=1e-3), None, UPDATE, ("add_", "addcdiv_", "_foreach_add_", "_foreach_addcdiv_", "_single_tensor")
    ),
}


def __getattr__(name: str) -> Any:
    """The factory of a system: a kind, or a kind, two underscores and a defect."""
    kind, _, defect = name.partition("__")
    if kind not in KINDS or (defect and (kind, defect) not in DEFECTS):
        raise AttributeError(name)

    def make(case: Any, mesh: Any) -> Any:
        watched = KINDS[kind](case, mesh)
        if defect:
            DEFECTS[kind, defect].put_in(watched, mesh.rank)  # type: ignore[call-arg]
        return watched

    return make
