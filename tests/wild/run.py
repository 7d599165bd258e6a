"""Runs bugs that were shipped: a release that has one must be DIFFERENT with the cause below, a mended one EQUAL.

    python tests/wild/run.py [-k PATTERN] [--page docs/wild.md]

Exits with 1 unless that holds for every bug. Each release has an environment of its own: its packages are installed
into folders, as `.wild/deepspeed-0.18.2`, that lie before those of the environment that `make abroad` makes; another
torch has the environment that `make lane-VERSION` makes. `--page` writes the lines of that page again, of the bugs that
ran.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.figures import figure

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FOLDERS = ROOT / ".wild"
REPORTS = ROOT / "reports" / "wild"
TORCH = "2.13.0"
"""The release of the environment that `make abroad` makes."""


UNKNOWN = "direction not known"


@dataclass(frozen=True)
class Bug:
    """A defect of a release, whose two systems are in the case of this name beside this file.

    `wrong` and `mended` are packages, as pip is asked for them. Where no release has a mend, `mended` is None, and the
    case's option of that name makes the candidate take the mend as a patch. `cause` is what the operator to blame
    begins with, its module and its direction; `judged` is "right", or says what else the cause is.
    """

    name: str
    thread: str | None
    what: str
    wrong: str
    mended: str | None
    cause: tuple[str, str | None, str | None]
    judged: str = "right"

    def row(self, wrong: dict[str, Any], mended: dict[str, Any]) -> str:
        """The line of the page: thread, what is wrong, releases, what bitproof says, whether that is right."""
        thread = f"[{'#' if self.thread else ''}{(self.thread or '').rpartition('/')[2] or 'new'}]"
        link = f"https://github.com/{self.thread}" if self.thread else "#new"
        operator, module, direction = cause_of(wrong)
        said = f"`{operator}` of {module or 'the step itself'} ({direction or UNKNOWN})"
        how = (wrong["first_divergence"] or {}).get("how") or ""
        cells = (
            f"{package_of(self.wrong)} {thread}({link})",
            self.what,
            f"{releases_of(self.wrong)}: {wrong['verdict']}",
            f"{releases_of(self.mended) if self.mended else 'patch'}: {mended['verdict']}",
            f"{said} {how}",
            self.judged,
            f"{wrong['minutes'] + mended['minutes']:.1f}",
        )
        return f"| {' | '.join(cells)} |"


def package_of(packages: str) -> str:
    """The package that has the bug, the last one that is named."""
    return packages.split()[-1].partition("==")[0]


def releases_of(packages: str) -> str:
    """Its release."""
    return packages.split()[-1].partition("==")[2]


HUB, OLD_HUB = "huggingface-hub==1.33.0", "huggingface-hub==1.33.0 tokenizers==0.22.2"
VISION = "torch==2.14.1 torchvision==0.29.1"
BUGS: tuple[Bug, ...] = (
    Bug(
        "torch_191763",
        "pytorch/pytorch/issues/191763",
        "fused SGD on a CPU leaves parameters in bfloat16 as they are",
        "torch==2.13.0",
        "torch==2.14.1",
        ("add_", None, "update"),
    ),
    Bug(
        "torch_185167",
        "pytorch/pytorch/issues/185167",
        "a weighted loss over a batch that is divided among ranks: each rank divides by its own weights",
        "torch==2.13.0",
        "torch==2.14.1",
        ("all_gather_into_tensor", None, None),
        "near: the right loss is of the rows that this call gathers; not verified",
    ),
    Bug(
        "deepspeed_7837",
        "deepspeedai/DeepSpeed/issues/7837",
        "ZeRO-0 in bfloat16 keeps its gradients and divides them by a scale",
        "deepspeed==0.18.5",
        "deepspeed==0.18.6",
        ("mul_", None, "update"),
    ),
    Bug(
        "deepspeed_7718",
        "deepspeedai/DeepSpeed/issues/7718",
        "ZeRO-2 with gradient accumulation loses micro-batches",
        "deepspeed==0.18.2",
        "deepspeed==0.18.3",
        ("add_", None, "update"),
    ),
    Bug(
        "diffusers_14265",
        "huggingface/diffusers/issues/14265",
        "the backward of ring attention reads the keys, values and output of its first turn in every turn",
        f"{HUB} diffusers==0.39.0",
        f"{HUB} diffusers==0.40.0",
        ("transpose", "", "backward"),
    ),
    Bug(
        "diffusers_ring_of_four",
        None,
        "over more than two ranks the backward of ring attention takes keys from one side and hands gradients to it",
        f"{HUB} diffusers==0.42.1",
        None,
        ("add_", "", "backward"),
    ),
    Bug(
        "lightly_1528",
        "lightly-ai/lightly/issues/1528",
        "gathered rows have the gradient of this rank's loss alone",
        f"{VISION} lightly==1.5.3",
        f"{VISION} lightly==1.5.4",
        ("allreduce_", "", "backward"),
    ),
    Bug(
        "lightly_1920",
        "lightly-ai/lightly/issues/1920",
        "SIGReg sums over ranks outside of autograd",
        f"{VISION} lightly==1.5.23",
        f"{VISION} lightly==1.5.24",
        ("allreduce_", "", "backward"),
    ),
    Bug(
        "lightly_1977",
        "lightly-ai/lightly/issues/1977",
        "Barlow Twins sums over ranks outside of autograd",
        f"{VISION} lightly==1.5.25",
        f"{VISION} lightly==1.5.26",
        ("allreduce_", "", "backward"),
    ),
    Bug(
        "lightning_18086",
        "Lightning-AI/pytorch-lightning/issues/18086",
        "gradients are not summed where a module steps by hand over a static graph",
        "lightning==2.5.5",
        "lightning==2.6.0",
        ("allreduce_", None, "backward"),
    ),
    Bug(
        "megatron_5337",
        "NVIDIA/Megatron-LM/issues/5337",
        "a sum over tensor-parallel ranks is lost where a gradient is not contiguous",
        "megatron-core==0.16.1",
        None,
        ("_unsafe_view", "encoder", "backward"),
        "near: the sum before this product is lost",
    ),
    Bug(
        "metric_learning_363",
        "KevinMusgrave/pytorch-metric-learning/issues/363",
        "the loss over all ranks has a gradient that is too small by their number",
        "pytorch-metric-learning==0.9.99",
        "pytorch-metric-learning==1.0.0",
        ("mul", "", "forward"),
    ),
    Bug(
        "pytorch_optimizer_346",
        "kozistr/pytorch_optimizer/issues/346",
        "ADOPT divides by a second moment that has this step's gradient",
        "pytorch-optimizer==3.4.0",
        "pytorch-optimizer==3.4.1",
        ("sqrt", None, "update"),
    ),
    Bug(
        "torch_optimizer_454",
        "jettify/pytorch-optimizer/issues/454",
        "SGDW takes one and the same decay from every parameter",
        "torch-optimizer==0.3.0",
        None,
        ("add_", None, "update"),
    ),
    Bug(
        "transformers_45120",
        "huggingface/transformers/issues/45120",
        "the router hands probabilities to a loss that takes them for logits",
        f"{OLD_HUB} transformers==5.5.0",
        f"{OLD_HUB} transformers==5.6.0",
        ("cat", "", "forward"),
    ),
    Bug(
        "transformers_48205",
        "huggingface/transformers/pull/48205",
        "the router's gradient lacks what experts of other ranks add to it",
        f"{HUB} transformers==5.16.1",
        f"{HUB} transformers==5.17.0",
        ("scatter", "model.layers.1.mlp.gate", "backward"),
    ),
    Bug(
        "transformers_48687",
        "huggingface/transformers/issues/48687",
        "the router learns from experts that its rank does not have",
        f"{HUB} transformers==5.17.0",
        f"{HUB} transformers==5.18.0",
        ("masked_fill", "model.layers.1.mlp.experts", "backward"),
    ),
    Bug(
        "vq_158",
        "lucidrains/vector-quantize-pytorch/issues/158",
        "lookup-free quantization sums over ranks outside of autograd",
        "vector-quantize-pytorch==1.16.1",
        None,
        ("expand", "quantizer", "backward"),
    ),
    Bug(
        "vq_222",
        "lucidrains/vector-quantize-pytorch/issues/222",
        "each rank's codebook takes a step by that rank's gradient",
        "vector-quantize-pytorch==1.23.1",
        "vector-quantize-pytorch==1.32.0",
        ("allreduce_", None, "update"),
    ),
    Bug(
        "vq_discarded",
        None,
        "lookup-free quantization throws away what its sum over ranks returns",
        "vector-quantize-pytorch==1.32.0",
        None,
        ("div", "quantizer", "forward"),
    ),
)


def environment(packages: str) -> tuple[str, dict[str, str]]:
    """The interpreter and the variables with which these packages are found; installs those that are missing."""
    python, folders = sys.executable, [FOLDERS / "common"]
    for package in packages.split():
        name, _, release = package.partition("==")
        if name == "torch":
            python = str(ROOT / f".venv-torch-{release}" / "bin" / "python") if release != TORCH else python
            continue
        folders.insert(0, FOLDERS / f"{name}-{release}")
        if not (folders[0] / "ready").exists():
            install = [
                sys.executable,
                "-m",
                "pip",
                "install",
                "--quiet",
                "--no-deps",
                "--target",
                str(folders[0]),
                package,
            ]
            subprocess.run(install, check=True, env={**os.environ, "PIP_CONSTRAINT": os.devnull})
            (folders[0] / "ready").touch()
    before = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    found = os.pathsep.join(filter(None, [*map(str, folders), *before]))
    compiled = str(folders[0] / "extensions")  # a folder each: torch locks it
    variables = {"DS_ACCELERATOR": "cpu", "LIGHTLY_DID_VERSION_CHECK": "True", "TORCH_EXTENSIONS_DIR": compiled}
    return python, {"PYTHONPATH": found, **variables}


def run(bug: Bug, *, mended: bool) -> dict[str, Any]:
    """The case's result with one release, and `minutes`."""
    case: dict[str, Any] = {"like": str(HERE / f"{bug.name}.json"), "name": bug.name}
    if mended:
        case |= {"expected": "EQUAL", "differs": [], "options": {"mended": bug.mended is None}}
    reports = REPORTS / bug.name / ("mended" if mended else "wrong")
    reports.mkdir(parents=True, exist_ok=True)
    file = reports / f"{bug.name}.json"
    file.write_text(json.dumps(case))
    python, variables = environment(bug.mended or bug.wrong if mended else bug.wrong)
    command = [python, "-m", "bitproof", "run", "--case", str(file), "--report-dir", str(reports)]
    started = time.monotonic()
    subprocess.run([*command, "--control", "when-different"], env={**os.environ, **variables}, check=False)
    result: dict[str, Any] = json.loads((reports / "latest" / "report.json").read_text())["cases"][0]
    return result | {"minutes": (time.monotonic() - started) / 60}


def cause_of(result: dict[str, Any]) -> tuple[str | None, str | None, str | None]:
    """The operator that is to blame, its module and its direction."""
    found = result["first_divergence"] or {}
    return found.get("operator"), found.get("module"), found.get("direction")


def problems(bug: Bug, wrong: dict[str, Any], mended: dict[str, Any]) -> list[str]:
    """What is not as it should be, in words."""
    operator, *place = cause_of(wrong)
    found = []
    if wrong["verdict"] != "DIFFERENT":
        found.append(f"{bug.name}: {bug.wrong} is {wrong['verdict']}, expected DIFFERENT")
    elif not (operator or "").startswith(bug.cause[0]) or place != list(bug.cause[1:]):
        found.append(f"{bug.name}: to blame is {(operator, *place)}, expected {bug.cause}")
    if mended["verdict"] != "EQUAL":
        found.append(f"{bug.name}: {bug.mended or 'the patch'} is {mended['verdict']}, expected EQUAL")
    return found


def main(words: list[str]) -> int:
    """Run them, and say what is wrong."""
    parser = argparse.ArgumentParser()
    parser.add_argument("-k", dest="expression", metavar="PATTERN", default="")
    parser.add_argument("--page", type=Path)
    chosen = parser.parse_args(words)
    chosen_bugs = [bug for bug in BUGS if re.search(chosen.expression, bug.name)]
    if not chosen_bugs:
        parser.error(f"-k {chosen.expression} matches no bug; there are {', '.join(bug.name for bug in BUGS)}")
    wrong: list[str] = []
    seen: list[tuple[Bug, dict[str, Any], dict[str, Any]]] = []
    for bug in chosen_bugs:
        try:
            seen.append((bug, run(bug, mended=False), run(bug, mended=True)))
        except (subprocess.CalledProcessError, OSError, LookupError) as error:
            wrong.append(f"{bug.name}: {error!r}")
            continue
        wrong += problems(*seen[-1])
        if chosen.page:
            write_row(chosen.page, bug.name, bug.row(*seen[-1][1:]))
    print(f"\n{table(seen)}\n", *(wrong or ["every bug is as expected"]), sep="\n")
    if chosen.expression:
        return int(bool(wrong))
    right = sum(bug.judged == "right" and not problems(bug, *found) for bug, *found in seen)
    return figure("wild", right) or int(bool(wrong))


def table(seen: list[tuple[Bug, dict[str, Any], dict[str, Any]]]) -> str:
    """A line a bug, and a count of what was flagged, of what is EQUAL once mended, and of right causes."""
    rows = [("bug", "wrong", "mended", "to blame", "cause", "minutes")]
    counts = dict.fromkeys(("flagged", "mended", "right"), 0)
    for bug, wrong, mended in seen:
        operator, module, direction = cause_of(wrong)
        is_stated = not problems(bug, wrong, mended)
        counts["flagged"] += wrong["verdict"] == "DIFFERENT"
        counts["mended"] += mended["verdict"] == "EQUAL"
        counts["right"] += is_stated and bug.judged == "right"
        blamed = f"{operator} of {module or 'the step itself'} ({direction})"
        judged = bug.judged.partition(":")[0] if is_stated else "NOT AS STATED"
        minutes = wrong["minutes"] + mended["minutes"]
        rows.append((bug.name, wrong["verdict"], mended["verdict"], blamed, judged, f"{minutes:.1f}"))
    total = sum(wrong["minutes"] + mended["minutes"] for _, wrong, mended in seen)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    num = len(seen)
    return "\n".join(lines) + (
        f"\n\nflagged {counts['flagged']} of {num}, mended EQUAL {counts['mended']} of {num}, "
        f"cause right {counts['right']} of {num}, {total:.0f} minutes"
    )


def write_row(page: Path, name: str, row: str) -> None:
    """Replace a bug's line of the page, which ends with its name in a comment."""
    lines = page.read_text().splitlines()
    mark = f"<!-- {name} -->"
    page.write_text("\n".join(f"{row} {mark}" if line.endswith(mark) else line for line in lines) + "\n")


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
