"""torchtitan 0.3.0 on CPUs: what wants a GPU or a download (metrics, tokenizer, data, some passes) is replaced."""

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
from torchtitan.config import DebugConfig, ParallelismConfig, TrainingConfig  # noqa: E402
from torchtitan.tools.utils import NoColor  # noqa: E402

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


def trainer(case, cls, spec, compile):
    """One of torchtitan's trainers, of two layers, with random text."""
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
    return own
