"""torchtitan 0.3.0's own trainers on CPUs. What wants a GPU or a download (metrics, tokenizer, data) is replaced."""

import dataclasses
import os
from types import SimpleNamespace as Made

import torch
import torch._utils

torch._utils._get_available_device_type = lambda: "cpu"
os.environ.setdefault("LOCAL_RANK", "0")
# fmt: off
import torchtitan.experiments.graph_trainer.make_fx_tracer as tracer  # noqa: E402
from torch.distributed.fsdp import FSDPModule  # noqa: E402
from torchtitan.components.checkpointer import CheckpointManager  # noqa: E402
from torchtitan.components.loss import CrossEntropyLoss  # noqa: E402
from torchtitan.components.optimizer import default_adamw  # noqa: E402
from torchtitan.config import CompileConfig, DebugConfig, ParallelismConfig, TrainingConfig  # noqa: E402
from torchtitan.experiments.graph_trainer.configs import EpOverlapConfig, GraphTrainerCompileConfig  # noqa: E402
from torchtitan.experiments.graph_trainer.deepseek_v3 import model_registry as deepseek_v3  # noqa: E402
from torchtitan.experiments.graph_trainer.trainer import GraphTrainer  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.llama3 import model_registry as llama3  # noqa: E402
from torchtitan.tools.utils import NoColor  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

import bitproof  # noqa: E402

# fmt: on
NEED_A_GPU = [
    "joint_transformer_block_bucketing_reordering_pass",
    "regional_inductor_pass",
    "insert_kernel_annotations_pass",
    "annotate_flex_attention_for_regional_inductor_pass",
    "cudagraph_pass",
]
fakeify = tracer._fakeify_input


def no_fresh_symbols(fake_mode, value, *, input_name):  # on torch 2.13
    with fake_mode.shape_env.ignore_fresh_unbacked_symbols():
        return fakeify(fake_mode, value, input_name=input_name)


tracer._fakeify_input = no_fresh_symbols


def made(case, cls, spec, compile):
    """One of torchtitan's trainers, watched."""
    vocab, stats = spec.model.vocab_size, Made(max_reserved_gib=0.0, max_reserved_pct=0.0)
    spec.model.layers = spec.model.layers[:2]

    def batches(*, dp_rank, seq_len, local_batch_size, **_):
        generator, positions = torch.Generator().manual_seed(dp_rank), torch.arange(seq_len).repeat(local_batch_size, 1)
        while True:
            text = torch.randint(vocab, (local_batch_size, seq_len + 1), generator=generator)
            yield {"input": text[:, :-1].contiguous(), "positions": positions}, text[:, 1:].contiguous()

    metrics = Made(color=NoColor(), ntokens_since_last_log=0, data_loading_times=[], should_log=lambda step: False)
    metrics.device_memory_monitor = Made(device_name="cpu", get_peak_stats=lambda: stats)
    sizes = dict(local_batch_size=case.batch.sequences, seq_len=case.batch.seq_len, disable_cuda_graphs=True)
    own = cls(cls.Config(
        model_spec=spec, compile=compile, loss=CrossEntropyLoss.Config(global_vocab_size=vocab),
        metrics=Made(build=lambda **_: metrics), tokenizer=Made(build=lambda **_: None), dataloader=Made(build=batches),
        activation_checkpoint=None, checkpoint=CheckpointManager.Config(enable=False),
        optimizer=dataclasses.replace(default_adamw(lr=case.optimizer.lr), implementation="for-loop"),
        training=TrainingConfig(steps=case.steps, mixed_precision_param=case.precision.compute, **sizes),
        parallelism=ParallelismConfig(
            data_parallel_shard_degree=case.parallelism.data_ranks, expert_parallel_degree=case.parallelism.ep,
            tensor_parallel_degree=case.parallelism.tp, spmd_backend="partial_dtensor"),
        debug=DebugConfig(seed=case.seed, deterministic=True)))  # fmt: skip
    for module in own.model_parts[0].modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo lacks another
    data, inner, losses = own.batch_generator(own.dataloader), own.forward_backward_step, []
    own.forward_backward_step = lambda **batch: losses.append(inner(**batch)) or losses[-1]

    def step(index):
        losses.clear()
        own.train_step(data)
        return sum(losses)

    return bitproof.watch(step, model=own.model_parts, optimizer=own.optimizers)


def deepseek(case, cls, strategy=None):
    spec = deepseek_v3("debugmodel", attn_backend="sdpa")
    overlap = EpOverlapConfig()
    if strategy:
        overlap = EpOverlapConfig(
            enabled=True, strategy=strategy, chunk_dim=case.chunking.dim, module_fqn=case.chunking.modules,
            disable_early_grad_accumulation=True)  # fmt: skip
    compile = dict(enable=True, components=["model"], ep_overlap=overlap, disable_passes=NEED_A_GPU)
    return made(case, cls, spec, GraphTrainerCompileConfig(**compile))


def eager(case, mesh):
    return deepseek(case, Trainer)


def graph(case, mesh):
    return deepseek(case, GraphTrainer)


def eager_chunked(case, mesh):
    return deepseek(case, Trainer, "eager")


def graph_chunked(case, mesh):
    return deepseek(case, GraphTrainer, "graph")


def llama(case, mesh, backend=None):
    spec = llama3("debugmodel", attn_backend="flex")
    for layer in spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    compiled = CompileConfig(enable=True, components=["model"], backend=backend) if backend else CompileConfig()
    return made(case, Trainer, spec, compiled)


def llama_compiled(case, mesh):
    return llama(case, mesh, "aot_eager")
