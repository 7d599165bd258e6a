"""Which of Inductor's own passes keep every bit? `prove_inductor.py [--keep DIR] [MODEL ...]` prints it.

Small models are compiled and trained a step, and each pass that torch's observer names is proved, alone, against the
graph that came in (`bitproof.keeps_bits`): joint graph, pre- and post-grad, pattern replacements. Then the step is
traced without Inductor, and proved against itself with one operator decomposed, for each that Inductor decomposes, and
after each pass over graphs of torchao and autoparallel, where these can be imported. A row is a pass: over how many
graphs it ran, and how many it left node for node; of the others, how many keep every bit by proof, in how many an
output was seen to differ, with one such witness, and of how many neither is known, with one reason. Inductor need not
keep bits: the table is no list of bugs. Each model has a process of its own. With `--keep` its rows stay in DIR, and
a run that was cut off goes on with the models that have none there.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import json
import subprocess
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._inductor.decomposition import select_decomp_table
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

sys.path.insert(0, str(Path(__file__).parents[2]))

from bitproof.harness.powers.proofs.prover.pairs import PairProof


class Attention(nn.Module):
    """A block of a transformer, written out."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.RMSNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        scores = (q @ k.transpose(-1, -2) / 4).softmax(-1)
        return x + self.out(scores @ v)


class Mlp(nn.Module):
    """Linear maps, a norm, numbers that are neutral and numbers that are not."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(torch.nn.functional.silu(self.up(x) * 1.0 + 0.0))
        return torch.cat([x[:4], x[4:]]) + self.down(y / 2).float().pow(2)


class Mixed(nn.Module):
    """Casts, views and a choice, in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(16, 16).bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        y = self.map(x.bfloat16()).float().bfloat16()
        return torch.where(x > 0, y.view(4, 32).reshape(8, 16), y.neg().neg()).float().t().contiguous().t()


class Pictures(nn.Sequential):
    """A convolution and a batch norm."""

    def __init__(self) -> None:
        super().__init__(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 4))


class Ours(nn.Module):
    """A model of a case of ours, on one rank."""

    def __init__(self, case: str) -> None:
        super().__init__()
        from bitproof.builtin_cases import CASES
        from bitproof.reference.init import initialize
        from bitproof.reference.models import build_model

        self.model = build_model(CASES[case].model)
        initialize(self.model, 0)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        found: Tensor = self.model(tokens, positions, None)
        return found


class Theirs(nn.Module):
    """A small model of transformers, by its configuration's class. It gets a mask, as trainers give one: without one it
    reads from positions, as a number, whether sequences are packed, which no graph holds."""

    def __init__(self, name: str, **sizes: int) -> None:
        super().__init__()
        import transformers

        config = getattr(transformers, name)(**sizes, attn_implementation="eager", use_cache=False)
        self.model = transformers.AutoModelForCausalLM.from_config(config)

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.model(input_ids=tokens, attention_mask=torch.ones_like(tokens)).logits
        return found


_SIZES = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 8}
_SIZES |= {"num_key_value_heads": 1, "intermediate_size": 32, "max_position_embeddings": 16}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_local_experts": 4}
_GPT2 = {"vocab_size": 64, "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2}
_GPT2 |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}

MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "attention": (Attention, (8, 16)),
    "mlp": (Mlp, (8, 16)),
    "mixed": (Mixed, (8, 16)),
    "pictures": (Pictures, (2, 3, 8, 8)),
    "llama3 of ours": (functools.partial(Ours, "blocks_batch_llama3"), (2, 8)),
    "qwen3_moe of ours": (functools.partial(Ours, "blocks_batch_qwen3_moe"), (2, 8)),
    "deepseek_v3 of ours": (functools.partial(Ours, "moe_seq"), (2, 8)),
    "Llama of transformers": (functools.partial(Theirs, "LlamaConfig", **_SIZES), (2, 8)),
    "Qwen3 of transformers": (functools.partial(Theirs, "Qwen3Config", **_SIZES), (2, 8)),
    "Qwen3-MoE of transformers": (functools.partial(Theirs, "Qwen3MoeConfig", **_SIZES, **_EXPERTS), (2, 8)),
    "GPT2 of transformers": (functools.partial(Theirs, "GPT2Config", **_GPT2), (2, 8)),
}
"""Models, and the shape of what each reads: real numbers, or tokens where it is of words."""


def proofs(name: str) -> list[dict[str, str | bool | None]]:
    """Compile a model, train it a step, and give what is known of each pass over each graph."""
    import bitproof

    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    build, shape = MODELS[name]
    model = build()
    x = torch.randint(0, 64, shape) if " of " in name else torch.randn(shape)
    with (
        bitproof.keeps_bits(check=False) as kept,
        torch._inductor.config.patch(force_disable_caches=True),  # type: ignore[attr-defined]
    ):
        torch.compile(model)(x).square().sum().backward()
    inductors = [_row(each.name, each.proof, each.changed) for each in kept.proofs]
    return inductors + one_by_one(build(), x)


def _row(name: str, proof: PairProof, changed: bool) -> dict[str, str | bool | None]:
    left = [answer for answer in proof.answers if answer.verdict != "PROVED"]
    witness = next((str(answer.witness) for answer in left if answer.witness), None)
    lines = [line for answer in left if answer.finding for line in answer.finding.lines()]
    reason = proof.reason or next((x.reason for x in left if x.reason), None) or next(iter(lines), None)
    proved = proof.verdict == "PROVED"
    return {"name": name, "proved": proved, "changed": changed, "witness": witness, "why": reason}


def one_by_one(model: nn.Module, x: Tensor) -> list[dict[str, str | bool | None]]:
    """The same of each decomposition of a training step, and of each pass of `others`."""
    import bitproof

    state = {name: p.detach() for name, p in model.named_parameters()} | dict(model.named_buffers())
    num_parameters = len([*model.parameters()])
    inputs = (x, *state.values())

    def step(x: Tensor, *given: Tensor) -> list[Tensor]:
        own = [p.requires_grad_() for p in given[:num_parameters]]
        held = dict(zip(state, (*own, *given[num_parameters:]), strict=True))
        loss = torch.func.functional_call(model, held, (x,)).square().sum()
        return [loss, *torch.autograd.grad(loss, own, allow_unused=True, materialize_grads=True)]

    def traced(**decomposed: Any) -> GraphModule:
        return make_fx(step, **decomposed)(*(y.clone() for y in inputs))

    found: list[dict[str, str | bool | None]] = []
    table = select_decomp_table()
    try:
        plain = traced()
    except RuntimeError as error:  # a model that reads a number from a tensor
        why = str(error).splitlines()[0]
        return [{"name": "a step, traced alone", "proved": False, "changed": True, "witness": None, "why": why}]
    used = sorted({node.target for node in plain.graph.nodes if node.target in table}, key=str)
    made = {f"decomposition of {op}": lambda op=op: traced(decomposition_table={op: table[op]}) for op in used}
    made |= {name: functools.partial(_after, change, plain) for name, change in others().items()}
    for name, make in made.items():
        try:
            other = make()
        except Exception as error:
            found.append({"name": name, "proved": False, "changed": True, "witness": None, "why": f"fails: {error}"})
            continue
        changed = [node.format_node() for node in plain.graph.nodes] != [x.format_node() for x in other.graph.nodes]
        found.append(_row(name, bitproof.prove(plain, other, *inputs), changed))
    return found


def _after(change: Callable[[GraphModule], object], module: GraphModule) -> GraphModule:
    changed = copy.deepcopy(module)
    change(changed)
    changed.recompile()
    return changed


def others() -> dict[str, Callable[[GraphModule], object]]:
    """Passes over graphs of torchao and autoparallel, of those that can be imported."""
    found: dict[str, Callable[[GraphModule], object]] = {}
    with contextlib.suppress(ImportError):
        pt2e = "torchao.quantization.pt2e"
        constant_fold, export_utils, utils = (
            importlib.import_module(f"{pt2e}.{name}") for name in ("constant_fold", "export_utils", "utils")
        )

        found["torchao: constant_fold"] = constant_fold.constant_fold
        found["torchao: _fuse_conv_bn_"] = utils._fuse_conv_bn_
        found["torchao: _fuse_linear_bn_"] = utils._fuse_linear_bn_
        found["torchao: _replace_dropout"] = lambda module: export_utils._replace_dropout(module, True)
    with contextlib.suppress(ImportError):
        graph_utils = importlib.import_module("autoparallel.graph_passes.graph_utils")

        found["autoparallel: cleanup_graph"] = graph_utils.cleanup_graph
        found["autoparallel: cleanup_graph, aggressive"] = lambda module: graph_utils.cleanup_graph(module, True)
        found["autoparallel: _replace_view_mm_view_with_einsum"] = graph_utils._replace_view_mm_view_with_einsum
        found["autoparallel: functionalize_fresh_index_put_mutations"] = (
            graph_utils.functionalize_fresh_index_put_mutations
        )
    return found


def main(names: list[str], keep: Path | None = None) -> int:
    """Run each model, print the table, and return 1 where a process fails or no pass was seen."""
    rows: dict[str, list[dict[str, str | bool | None]]] = defaultdict(list)
    failed: list[str] = []
    for name in names:
        kept = keep and keep / f"{name.replace(' ', '_')}.json"
        if kept is None or not kept.exists():
            command = [sys.executable, __file__, "--model", name]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                failed.append(f"{name}: {done.stderr.strip().splitlines()[-1]}")
                continue
            found = done.stdout.splitlines()[-1]
            if kept is not None:
                kept.parent.mkdir(parents=True, exist_ok=True)
                kept.write_text(found)
        else:
            found = kept.read_text()
        for each in json.loads(found):
            rows[str(each["name"])].append(each)
    print("| pass | graphs | left as they were | kept, by proof | seen to differ | neither | such a one |")
    print("|---|---|---|---|---|---|---|")
    for name, seen in sorted(rows.items()):
        changed = [x for x in seen if x["changed"]]
        proved, differ = [x for x in changed if x["proved"]], [x for x in changed if x["witness"]]
        rest = [x for x in changed if x not in proved and x not in differ]
        notes = [*(str(x["witness"]) for x in differ), *(str(x["why"]) for x in rest)]
        counts = (len(seen), len(seen) - len(changed), len(proved), len(differ), len(rest))
        print(f"| {name} | {' | '.join(map(str, counts))} | {notes[0].splitlines()[0][:120] if notes else ''} |")
    print(f"\n{len(rows)} passes, torch {torch.__version__}, models: {', '.join(names)}")
    print(*(f"not compiled: {line}" for line in failed), sep="\n")
    return int(not rows or bool(failed))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--model"]:
        print(json.dumps(proofs(sys.argv[2])))
    else:
        given, folder = sys.argv[1:], None
        if given[:1] == ["--keep"]:
            folder, given = Path(given[1]), given[2:]
        sys.exit(main(given or [*MODELS], folder))
