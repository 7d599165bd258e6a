"""What does `prove` say of ordinary models' training steps? `prove_models.py [--json FILE] [MODEL ...]` prints a table.

Each model (`ordinary_models.py`) is small, has random weights and does one training step: forward, loss, and all
gradients. The step is proved twice: against itself, and against the same step with a rewrite that keeps every bit (the
batch is cut in two and joined again, and each gradient is multiplied by one). A row states both verdicts, how many
outputs there are, and the reason of each refusal. Nothing is downloaded. Each model has a process of its own.

Status 1: a step is not PROVED for another reason than the table of known ones (`KNOWN`) states.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.benchmarks.ordinary_models import MODELS
from tests.figures import figure

KNOWN: dict[str, str] = {
    "transformers T5": "wrote a part of its memory",  # the labels, shifted in place
    "Llama, complex RoPE": "aten._conj.default",  # the gradient of a complex product: conjugated when it is read
    "LSTM": "aten.mkldnn_rnn_layer.default",  # its fakes do not say what it does: workspace, gradients of biases
    "GRU": "wrote a part of its memory",  # gates are parts of one product, and added to in place
    "ConvNeXt": "native_layer_norm_backward",  # of permuted inputs, where its fake has other strides than the kernel
    "MLP-Mixer": "native_layer_norm_backward",
    "DLRM": "aten._embedding_bag.default",  # a scan saw it misbehave
}
"""For each model that is not PROVED, a part of the reason."""


def steps_of(name: str) -> tuple[Callable[..., Any], Callable[..., Any], tuple[Any, ...]]:
    """A model's step, its rewrite, and the inputs that both take."""
    torch.manual_seed(0)
    model, loss_of, inputs = MODELS[name]()

    def step(model: nn.Module, *inputs: Tensor) -> tuple[Tensor, ...]:
        loss = loss_of(model, *inputs)
        wanted = [x for x in model.parameters() if x.requires_grad]
        return (loss, *(x for x in torch.autograd.grad(loss, wanted, allow_unused=True) if x is not None))

    def rewritten(model: nn.Module, *inputs: Tensor) -> tuple[Tensor, ...]:
        loss, *gradients = step(model, *(torch.cat([x[:1], x[1:]]) if x.dim() else x for x in inputs))
        return (loss, *(x * 1 for x in gradients))

    return step, rewritten, (model, *inputs)


def prove_model(name: str) -> dict[str, Any]:
    """A model's row: verdicts, outputs, and the reasons of what is not PROVED."""
    import bitproof

    warnings.simplefilter("ignore")
    start = time.process_time()
    row: dict[str, Any] = {"model": name}
    step, rewritten, given = steps_of(name)
    for column, other in (("itself", step), ("rewritten", rewritten)):
        found = bitproof.prove(step, other, *given)
        reasons = [found.reason] if found.reason else []
        reasons += [x.reason or x.witness or x.verdict for x in found.answers if x.verdict != "PROVED"]
        proved = sum(x.verdict == "PROVED" for x in found.answers)
        row[column] = {
            "verdict": found.verdict,
            "proved": proved,
            "outputs": len(found.answers),
            "reasons": [*dict.fromkeys(reasons)],
        }
    return row | {"seconds": round(time.process_time() - start, 1)}


def main() -> int:
    """Prove, print, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="MODEL")
    parser.add_argument("--json", type=Path, help="write the rows here")
    given = parser.parse_args()
    rows = []
    print("| model | against itself | against its rewrite | outputs | why not |\n|---|---|---|---|---|")
    context = multiprocessing.get_context("spawn")
    for name in given.names or MODELS:
        with context.Pool(1) as pool:
            row = pool.apply(prove_model, (name,))
        rows.append(row)
        reasons = dict.fromkeys([*row["itself"]["reasons"], *row["rewritten"]["reasons"]])
        text = "; ".join(" ".join(x.split())[:200] for x in [*reasons][:3])
        verdicts = row["itself"]["verdict"], row["rewritten"]["verdict"]
        print(f"| {name} | {' | '.join(verdicts)} | {row['itself']['outputs'] or ''} | {text} |", flush=True)
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1) + "\n")
    proved = sum(row["rewritten"]["verdict"] == row["itself"]["verdict"] == "PROVED" for row in rows)
    print(f"\n{proved} of {len(rows)} PROVED both times; torch {torch.__version__}")
    unknown = [row["model"] for row in rows if not _is_known(row)]
    print(f"not PROVED for a reason that is not known: {', '.join(unknown) or 'none'}")
    status = int(bool(unknown))
    return status if given.names else status or figure("fuzz.prove_models", proved)


def _is_known(row: dict[str, Any]) -> bool:
    sides = row["itself"], row["rewritten"]
    if all(side["verdict"] == "PROVED" for side in sides):
        return True
    reasons = [reason for side in sides for reason in side["reasons"]]
    return row["model"] in KNOWN and any(KNOWN[row["model"]] in reason for reason in reasons)


if __name__ == "__main__":
    sys.exit(main())
