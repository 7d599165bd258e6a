"""torchtitan's trainers on CPUs, by its own command line: `options` says what both sides share, and each side's own."""

from functools import partial
from unittest.mock import Mock

import torch

torch._utils._get_available_device_type = lambda: "cpu"
from torchtitan.components import metrics  # noqa: E402
from torchtitan.config import ConfigManager  # noqa: E402
from torchtitan.experiments.graph_trainer import make_fx_tracer  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402

import bitproof  # noqa: E402

torch.distributed.ReduceOp.PREMUL_SUM = {1.0: torch.distributed.ReduceOp.SUM}.__getitem__  # gloo lacks other factors
no_memory = Mock(device_name="cpu", get_peak_stats=lambda: metrics.DeviceMemStats(*6 * [0]))
metrics.build_device_memory_monitor = lambda: no_memory


def no_fresh_symbols(mode, *given, fakeify=make_fx_tracer._fakeify_input, **names):  # as later torches do
    with mode.shape_env.ignore_fresh_unbacked_symbols():
        return fakeify(mode, *given, **names)


make_fx_tracer._fakeify_input = no_fresh_symbols


def random_text(*, dp_rank, seq_len, local_batch_size, **_):
    for text in torch.randint(2048, (99, local_batch_size, seq_len + 1), generator=torch.manual_seed(dp_rank)):
        yield {"input": text[:, :-1], "positions": torch.arange(seq_len).repeat(local_batch_size, 1)}, text[:, 1:]


def trainer(case, mesh, side):
    words = " ".join(case.options[name] for name in ("titan", side, "small"))
    config = ConfigManager().parse_args(f"--training.steps {case.steps} --debug.seed {case.seed} {words}".split())
    del config.model_spec.model.layers[2:]
    for layer in config.model_spec.model.layers:  # the kernels of flex attention have no backward on a CPU
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config.tokenizer, config.dataloader = Mock(), Mock(build=random_text)  # the wheel lacks the files of both
    it = config.build()
    return bitproof.watch(train=it.train, model=it.model_parts, optimizer=it.optimizers, loss=it.forward_backward_step)


reference, candidate = partial(trainer, side="reference"), partial(trainer, side="candidate")
