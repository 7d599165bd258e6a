"""Runs every case of this folder, in the environment that `make abroad` makes: verdicts, and causes where they differ.

    python tests/abroad/run.py [EXPRESSION]

Exits with 1 unless each case gets its expected verdict, and of each that differs the cause that stands here.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).parent
REPORTS = Path("reports") / "abroad"
PACKAGES = ("torch", "torchtitan", "transformers", "accelerate", "lightning")

CAUSES = {
    "accelerated_lr": ("mul_", None, "update"),
    "hf_llama_eps": ("add.Tensor", "model.layers.1.input_layernorm", "forward"),
    "hf_trainer_clipping": ("mul", None, "update"),
    "lit_accumulating": ("div.Tensor", "", "forward"),  # Lightning divides the loss
    "pipelined_order": ("add_.Tensor", "layer0.0", "backward"),  # the parameter whose gradient is shown
    "titan_chunked": ("add.Tensor", None, None),
}
"""Of each case that differs what the operator to blame begins with, its module and its direction."""


def wrong_causes(report: dict[str, object]) -> list[str]:
    """The cases whose cause is another than the one that stands here, in words."""
    wrong = []
    for result in report["cases"]:  # type: ignore[attr-defined]
        name, found = result["name"], result["first_divergence"] or {}
        cause = found.get("operator"), found.get("module"), found.get("direction")
        expected = CAUSES.get(name, (None, None, None))
        if (cause[0] or "").startswith(expected[0] or "") and cause[1:] == expected[1:]:
            continue
        wrong.append(f"{name}: to blame is {cause}, expected {expected}")
    return wrong


def main(expression: str = "") -> int:
    """Run them, and say what is wrong."""
    print(", ".join(f"{name} {version(name)}" for name in PACKAGES), flush=True)
    files = [word for file in sorted(HERE.glob("*.json")) for word in ("--case", str(file))]
    selection = ["-k", expression] if expression else []
    command = [sys.executable, "-m", "bitproof", "run", *files, *selection, "--report-dir", str(REPORTS)]
    status = subprocess.run([*command, "--control", "when-different"], check=False).returncode
    wrong = wrong_causes(json.loads((REPORTS / "latest" / "report.json").read_text()))
    print("\n".join(wrong or ["every cause is the expected one"]))
    return status or int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
