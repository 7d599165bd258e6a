"""Our tracing and passes beside the peer's, torchtitan 0.3.0's graph_trainer, on one shape.

    python tests/benchmarks/bench_peer.py [--runs N] [--peer-python PYTHON]

The shape: dim 64, 1 dense and 2 MoE layers, 4 sequences of 32 tokens, 8 ranks, expert parallelism 2, early gradient
accumulation off. Each side lives in one process with one thread, is warmed up by one run, and then the sides take
turns: trace anew, find the chunk dim, chunk, concretize. Neither sends anything; the peer gets torch's fake process
group. Seconds are each process's own, so that a busy machine does not blur them. Goal: our passes, verified, take at
most a third of the peer's time.

The peer is installed from the package registry into an environment of its own that sees this one's torch, and is
removed afterwards; `--peer-python` names a Python that has it already. Where it cannot be installed or run, our figures
are compared with those published for it.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import logging
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).parents[2]
PEER = "torchtitan==0.3.0"  # imports triton, which torch for CPUs does not bring
GOAL = 1 / 3
WORLD_SIZE, EXPERT_RANKS = 8, 2
SEQUENCES, SEQ_LEN, VOCABULARY = 4, 32, 264
SHAPES = {
    "transformer_batch": ("batch", "layers.*"),
    "moe_batch": ("batch", "layers.*.moe"),
    "moe_seq": ("seq", "layers.*.moe"),
}
# Seconds on 2 cores, torch 2.13.0, one process, as this project's design records them.
PUBLISHED = {
    "transformer_batch": {"trace": 4.1, "chunk": 2.2, "concretize": 1.2},
    "moe_batch": {"trace": 4.1, "chunk": 0.8, "concretize": 1.2},
    "moe_seq": {"trace": 4.1, "chunk": 0.8, "concretize": 1.2},
}
Seconds = dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--peer-python", help="a Python that can import torchtitan 0.3.0 and torch")
    parser.add_argument("--side", choices=("peer", "ours"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        serve({"peer": make_peer, "ours": make_ours}[options.side]())
        return
    with contextlib.ExitStack() as stack:
        ours = stack.enter_context(side("ours", sys.executable))
        try:
            peer = stack.enter_context(side("peer", options.peer_python or stack.enter_context(installed())))
        except (subprocess.CalledProcessError, EOFError) as error:
            print(f"the peer does not run here ({error}); compared with its published figures", flush=True)
            peer = PUBLISHED.__getitem__
        for name in SHAPES:
            runs = [(ours(name), peer(name)) for _ in range(options.runs + 1)][1:]
            report(name, *(median(each) for each in zip(*runs, strict=True)))


def report(name: str, ours: Seconds, peer: Seconds) -> None:
    """Both sides' seconds, and ours as a share of the peer's."""
    for seconds in (ours, peer):
        seconds["passes"] = sum(value for part, value in seconds.items() if part != "trace")
    print(f"{name:18}{'ours, s':>10}{'peer, s':>10}{'ours / peer':>14}")
    for part, value in ours.items():
        theirs = peer.get(part, 0.0)
        note = f"  over {GOAL:.2f}" if part == "passes" and value > GOAL * peer["passes"] else ""
        share = f"{value / theirs:14.2f}" if theirs else f"{'':14}"
        print(f"  {part:16}{value:10.3f}{theirs:10.3f}{share}{note}", flush=True)


def median(runs: tuple[Seconds, ...]) -> Seconds:
    return {part: statistics.median(run[part] for run in runs) for part in runs[0]}


# -- processes --------------------------------------------------------------------------------------


@contextlib.contextmanager
def installed() -> Iterator[str]:
    """A Python in a temporary environment that has the peer, and this environment's packages behind its own."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = str(Path(folder) / "bin" / "python")
        query = "import sysconfig; print(sysconfig.get_path('purelib'))"
        packages = subprocess.run([python, "-c", query], capture_output=True, text=True, check=True).stdout.strip()
        shared = subprocess.run(
            [sys.executable, "-c", query], capture_output=True, text=True, check=True
        ).stdout.strip()
        Path(packages, "shared.pth").write_text(f"{shared}\n")
        print(f"installing {PEER} ...", flush=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", PEER, "triton"], check=True)
        yield python


@contextlib.contextmanager
def side(name: str, python: str) -> Iterator[Callable[[str], Seconds]]:
    """A process that runs one side; call what is yielded with a shape's name. Raises EOFError when it died."""
    command = [python, __file__, "--side", name]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin and process.stdout

        def answer() -> Any:
            for line in process.stdout or ():
                if line.startswith("answer "):  # the peer prints, too
                    return json.loads(line.removeprefix("answer "))
            raise EOFError(f"{name} ended")

        def run(shape: str) -> Seconds:
            print(shape, file=process.stdin, flush=True)
            return answer()

        try:
            answer()
            yield run
        finally:
            process.stdin.close()


def serve(run: Callable[[str, str], Seconds]) -> None:
    """Run one side: a shape's name comes in, its seconds go out."""
    print("answer {}", flush=True)
    for line in sys.stdin:
        print("answer " + json.dumps(run(*SHAPES[line.strip()])), flush=True)


# -- the sides ----------------------------------------------------------------------------------------


def make_ours() -> Callable[[str, str], Seconds]:
    """Ours: `prepare`, as it is run; a pass's time includes the verification of what it was given."""
    sys.path.insert(0, str(ROOT))
    import torch

    from bitproof.builtin_cases.chunking import CASES
    from bitproof.harness.systems.graph import prepare

    torch.set_num_threads(1)

    clock = _Clock()
    for module in ("bitproof.harness.graph.tracing.trace", "bitproof.harness.graph.pipeline"):
        logging.getLogger(module).setLevel(logging.DEBUG)
        logging.getLogger(module).addHandler(clock)

    def run(dim: str, modules: str) -> Seconds:
        case = next(c for c in CASES if c.chunking and (c.chunking.dim, c.chunking.modules) == (dim, modules))
        clock.times = [time.process_time()]
        prepare(case, torch.device("cpu"))
        trace, *passes = (later - earlier for earlier, later in itertools.pairwise(clock.times))
        return {"trace": trace, "clean up": passes[0], "chunk": passes[1], "concretize": passes[2]}

    return run


class _Clock(logging.Handler):
    """The time of each line that the pipeline logs: one after the trace and after each pass."""

    times: list[float]

    def emit(self, _: logging.LogRecord) -> None:
        self.times.append(time.process_time())


def make_peer() -> Callable[[str, str], Seconds]:
    """The peer: its tracer and its passes, in the order in which its trainer runs them."""
    import torch
    from torchtitan.tools import utils

    utils.device_type, utils.device_module = "cpu", torch.cpu
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.experiments.graph_trainer import ep_chunk_pass, ep_pass_utils, make_fx_tracer
    from torchtitan.experiments.graph_trainer.trainer import make_fwd_bwd_step

    torch.set_num_threads(1)
    fakeify = make_fx_tracer._fakeify_input

    def fakeify_on_torch_2_13(mode: Any, x: Any, **options: Any) -> Any:
        with mode.shape_env.ignore_fresh_unbacked_symbols():  # without it this torch refuses to trace what is fresh
            return fakeify(mode, x, **options)

    make_fx_tracer._fakeify_input = fakeify_on_torch_2_13
    step = make_fwd_bwd_step(model := peer_model(), CrossEntropyLoss.Config().build())

    def run(dim: str, modules: str) -> Seconds:
        def mark(args: tuple[Any, ...], _: Any) -> None:
            for x in (args[0], args[1], args[3]["positions"]):
                ep_chunk_pass.mark_chunk_dynamic_dims(x, mode=dim)

        tokens = torch.zeros(SEQUENCES, SEQ_LEN, dtype=torch.int64)
        positions = torch.arange(SEQ_LEN).repeat(SEQUENCES, 1)
        num_tokens = torch.tensor(float(tokens.numel()))
        start = time.process_time()
        traced = make_fx_tracer.minimal_fx_tracer(step, module=model, prepare_inputs=mark)(
            tokens, tokens.clone(), num_tokens, {"positions": positions}
        )
        after_trace = time.process_time()
        graph = ep_chunk_pass.populate_chunk_dim_metadata_pass(traced.gm, mode=dim)
        graph = ep_chunk_pass.ep_overlap_chunk_pass(
            graph,
            mode=dim,
            module_pattern=modules,
            num_static_inputs=traced.num_static_inputs,
            optimize_grad_live_out=False,
        )
        after_chunk = time.process_time()
        ep_pass_utils.concretize_ep_chunk_symbolic_shapes_pass(graph, traced.example_inputs)
        end = time.process_time()
        return {"trace": after_trace - start, "chunk": after_chunk - after_trace, "concretize": end - after_chunk}

    return run


def peer_model() -> Any:
    """The peer's DeepSeek-V3 in our tiny model's dims, sharded by its own code over a fake process group."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from torchtitan.config import ParallelismConfig, TrainingConfig
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed.utils import set_spmd_backend
    from torchtitan.experiments.graph_trainer.common_utils import build_decoder_config_for_backend
    from torchtitan.experiments.graph_trainer.configs import GraphTrainerCompileConfig
    from torchtitan.experiments.graph_trainer.deepseek_v3 import parallelize_deepseekv3
    from torchtitan.experiments.graph_trainer.deepseek_v3.model import GraphTrainerDeepSeekV3Model
    from torchtitan.models import deepseek_v3
    from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm

    zeros: Any = {"weight": nn.init.zeros_, "bias": nn.init.zeros_}

    def build(attn_backend: str) -> Any:
        layers = deepseek_v3.build_mla_moe_layers(
            n_layers=3,
            n_dense_layers=1,
            dim=64,
            n_heads=4,
            q_lora_rank=0,
            kv_lora_rank=32,
            qk_nope_head_dim=8,
            qk_rope_head_dim=8,
            v_head_dim=16,
            mscale=1.0,
            dense_hidden_dim=128,
            moe_hidden_dim=64,
            num_experts=8,
            num_shared_experts=1,
            router_top_k=3,
            router_score_func="sigmoid",
            router_num_expert_groups=4,
            router_num_limited_groups=2,
            router_route_scale=2.5,
            router_route_norm=True,
            attn_backend=attn_backend,
            moe_comm_backend="standard",
            non_blocking_capacity_factor=None,
            linear_init=zeros,
            norm_init=zeros,
            depth_init=lambda _: zeros,
            depth_experts_init=lambda _: {name: nn.init.zeros_ for name in ("w1_EFD", "w2_EDF", "w3_EFD")},
            rope=ComplexRoPE.Config(
                dim=8, max_seq_len=512, theta=10000.0, scaling="yarn", rope_factor=4.0, original_seq_len=128
            ),
        )
        return deepseek_v3.DeepSeekV3Model.Config(
            vocab_size=VOCABULARY,
            dim=64,
            tok_embeddings=Embedding.Config(num_embeddings=VOCABULARY, embedding_dim=64, param_init=zeros),
            norm=RMSNorm.Config(normalized_shape=64, param_init=zeros),
            lm_head=Linear.Config(in_features=64, out_features=VOCABULARY, param_init=zeros),
            layers=layers,
            mtp_layers=[],
        )

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD_SIZE)
    set_spmd_backend("partial_dtensor")
    base = build_decoder_config_for_backend(build, "sdpa")
    config = GraphTrainerDeepSeekV3Model.Config(**{f.name: getattr(base, f.name) for f in fields(base)})
    parallelism = ParallelismConfig(expert_parallel_degree=EXPERT_RANKS, spmd_backend="partial_dtensor")
    config.update_from_config(config=SimpleNamespace(parallelism=parallelism))
    with torch.device("meta"):
        model = config.build()
    dims = ParallelDims(
        dp_replicate=1,
        dp_shard=WORLD_SIZE,
        cp=1,
        tp=1,
        pp=1,
        ep=EXPERT_RANKS,
        world_size=WORLD_SIZE,
        spmd_backend="partial_dtensor",
    )
    model = parallelize_deepseekv3(
        model,
        parallel_dims=dims,
        training=TrainingConfig(local_batch_size=SEQUENCES, seq_len=SEQ_LEN),
        parallelism=parallelism,
        compile_config=GraphTrainerCompileConfig(enable=True, mode="aot_fx_trace"),
        ac_config=None,
        dump_folder="",
    )
    return model.to_empty(device="cpu")


if __name__ == "__main__":
    main()
