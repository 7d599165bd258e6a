"""Configurations for torchtitan 0.3.0 on CPUs: what wants a GPU, a newer torch, or files that its wheel lacks, goes."""

from types import SimpleNamespace as Made

import torch

torch._utils._get_available_device_type = lambda: "cpu"
import torchtitan.experiments.graph_trainer.make_fx_tracer as tracer  # noqa: E402
from torch.distributed.fsdp import FSDPModule  # noqa: E402
from torchtitan.components import metrics  # noqa: E402
from torchtitan.experiments.graph_trainer.deepseek_v3 import config_registry as deepseek  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.llama3 import config_registry as llama  # noqa: E402

no_memory = Made(device_name="cpu", device_capacity_gib=0, get_peak_stats=lambda: metrics.DeviceMemStats(*6 * [0]))
no_memory.reset_peak_stats = metrics.build_device_memory_monitor = lambda: no_memory


def no_fresh_symbols(mode, value, *, input_name):  # as later torches do
    with mode.shape_env.ignore_fresh_unbacked_symbols():
        return fakeify(mode, value, input_name=input_name)


def divided_after_the_sum(module, factor):  # gloo lacks sums of products
    divide(module, factor)
    module.set_force_sum_reduction_for_comms(True)


divide, FSDPModule.set_gradient_divide_factor = FSDPModule.set_gradient_divide_factor, divided_after_the_sum
fakeify, tracer._fakeify_input = tracer._fakeify_input, no_fresh_symbols


def random_text(*, dp_rank, seq_len, local_batch_size, **_):
    generator = torch.Generator().manual_seed(dp_rank)
    while True:
        text = torch.randint(2048, (local_batch_size, seq_len + 1), generator=generator)
        yield {"input": text[:, :-1], "positions": torch.arange(seq_len).repeat(local_batch_size, 1)}, text[:, 1:]


def small(config):
    """One of torchtitan's with two layers, attention without kernels for GPUs, and random text."""
    layers = config.model_spec.model.layers = config.model_spec.model.layers[:2]
    for layer in layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config.tokenizer, config.dataloader = Made(build=lambda **_: None), Made(build=random_text)
    config.loss, config.activation_checkpoint, config.compile.components = config.loss.loss_fn, None, ["model"]
    config.training.local_batch_size, config.training.seq_len, config.training.disable_cuda_graphs = 4, 16, True
    config.training.mixed_precision_param, config.optimizer.implementation = "float32", "for-loop"
    config.debug.deterministic = True
    return config


def deepseek_v3():
    config = small(deepseek.graph_trainer_deepseek_v3_debugmodel())
    config.compile.disable_passes = ["joint_transformer_block_bucketing_reordering_pass", "cudagraph_pass"]
    return config


def chunked_deepseek_v3():
    config = deepseek_v3()
    config.compile.ep_overlap.enabled = config.compile.ep_overlap.disable_early_grad_accumulation = True
    return config


def llama3():
    return small(llama.llama3_debugmodel())
