"""torchtitan 0.3.0's own trainers, as `titan_on_cpu` builds them: eager, traced and rewritten, compiled."""

from functools import partial

from titan_on_cpu import NEED_A_GPU, trainer  # first: torchtitan looks for a device when it is imported
from torchtitan.config import CompileConfig
from torchtitan.experiments.graph_trainer.configs import EpOverlapConfig, GraphTrainerCompileConfig
from torchtitan.experiments.graph_trainer.deepseek_v3 import model_registry as deepseek_v3
from torchtitan.experiments.graph_trainer.trainer import GraphTrainer
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import model_registry as llama3
from torchtitan.trainer import Trainer

import bitproof


def watched(it):
    return bitproof.watch(train=it.train, model=it.model_parts, optimizer=it.optimizers, loss=it.forward_backward_step)


def deepseek(case, mesh, cls, strategy=None):
    chunks = dict(strategy=strategy, chunk_dim=case.chunking.dim, module_fqn=case.chunking.modules) if strategy else {}
    overlap = EpOverlapConfig(enabled=bool(chunks), disable_early_grad_accumulation=bool(chunks), **chunks)
    compile = dict(enable=True, components=["model"], ep_overlap=overlap, disable_passes=NEED_A_GPU)
    spec = deepseek_v3("debugmodel", attn_backend="sdpa")
    return watched(trainer(case, cls, spec, GraphTrainerCompileConfig(**compile)))


eager = partial(deepseek, cls=Trainer)
graph = partial(deepseek, cls=GraphTrainer)
eager_chunked = partial(deepseek, cls=Trainer, strategy="eager")
graph_chunked = partial(deepseek, cls=GraphTrainer, strategy="graph")


def llama(case, mesh, backend=None):
    spec = llama3("debugmodel", attn_backend="flex")
    for layer in spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    compiled = CompileConfig(enable=True, components=["model"], backend=backend) if backend else CompileConfig()
    return watched(trainer(case, Trainer, spec, compiled))


llama_compiled = partial(llama, backend="aot_eager")
