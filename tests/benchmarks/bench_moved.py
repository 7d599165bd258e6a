"""Ground truth of `bitproof moved`: planted moves in twenty models, environments without a plant, speed, and a table.

    python -m tests.benchmarks.bench_moved truth --plants 200
    python -m tests.benchmarks.bench_moved quiet --replays 2000
    python -m tests.benchmarks.bench_moved speed --calls 2000
    python -m tests.benchmarks.bench_moved table --env ATEN_CPU_CAPABILITY=avx2 --python PATH --folder DIR > table.md

A planted move replaces an operator's CPU kernel: another order of additions, an accumulator of other precision, no
fused multiply-add, another exp, subnormals that become zero, a wrong edge, a wrong lane. A plant counts if it changes
bits of a recorded call. It is named if exactly its operator moves; its class is right if a stated cause has the
expected words.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import itertools
import json
import math
import os
import random
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bitproof.harness.powers.moved.environments import START, Environment
from bitproof.harness.powers.moved.move_causes import causes_of
from bitproof.harness.powers.moved.standalone.call_archive import Archive
from bitproof.harness.powers.moved.standalone.exchanging import run_exchanged
from bitproof.harness.powers.moved.standalone.order_probes import probe
from bitproof.harness.powers.moved.standalone.recording_calls import keep_results, record
from bitproof.harness.powers.moved.standalone.replaying import replay, run_call
from bitproof.harness.processes.command import run_command
from tests.benchmarks import harmless_environments, moved_models
from tests.harness.powers.moved.plants import backwards, flushed, in_order, narrow, planted, products_of, wide

ORDER, BITS, EXP, FUSED = "another order", "an accumulator of", "elementary function", "no fused multiply-add"
EACH = 200
"""Environments that share a process started anew: each is a fork of it, changed further."""
CLASSES = {
    # MKL's kernels add in order here, and fuse: a sum in order differs from them by the fused multiply-add alone.
    **{"in order": (ORDER, FUSED), "backwards": (ORDER,), "narrow": (BITS,), "wide": (BITS, ORDER)},
    **{"unfused": (FUSED,), "exp2": (EXP,), "flushed": ("subnormals",), "edge": (EXP,), "lane": (EXP,)},
}
"""Words of a right cause, by the kind of plant. A wrong edge is shown by its place; a function's edge also in EXP."""


class Plant(NamedTuple):
    """An operator, the kind of its move, and the kernel in its place."""

    operator: str
    kind: str
    kernel: Callable[..., Any]


def _sum(add: Callable[[Tensor], Tensor], x: Tensor, dims: Any, keepdim: bool) -> Tensor:
    dims = sorted({dim % x.dim() for dim in (dims or range(x.dim()))})
    kept = [dim for dim in range(x.dim()) if dim not in dims]
    terms = x.permute(*kept, *dims).flatten(len(kept))
    result = add(terms)
    return result.reshape([1 if dim in dims else size for dim, size in enumerate(x.shape)]) if keepdim else result


def _exp2(x: Tensor) -> Tensor:
    return torch.exp2(x * 1.4426950408889634)


def _softmax(x: Tensor, dim: int) -> Tensor:
    raised = _exp2(x - x.amax(dim, keepdim=True))
    return raised / raised.sum(dim, keepdim=True)


def written_plants() -> list[Plant]:
    """Plants with kernels written out."""
    found = []
    for kind, add in (("in order", in_order), ("backwards", backwards), ("narrow", narrow), ("wide", wide)):
        found += [
            Plant("mm", kind, lambda a, b, add=add: add(products_of(a, b)).to(a.dtype)),
            Plant("bmm", kind, lambda a, b, add=add: add(products_of(a, b)).to(a.dtype)),
            Plant(
                "addmm", kind, lambda c, a, b, *, beta=1, alpha=1, add=add: add(products_of(a, b)) * alpha + c * beta
            ),
            Plant("sum.dim_IntList", kind, lambda x, d, k=False, *, dtype=None, add=add: _sum(add, x, d, k)),
            Plant("mean.dim", kind, lambda x, d, k=False, *, dtype=None, add=add: _mean(add, x, d, k)),
            Plant("mean", kind, lambda x, *, dtype=None, add=add: _mean(add, x, None, False)),
        ]
    return [
        *found,
        Plant("addcmul_", "unfused", lambda x, a, b, *, value=1: x.copy_(x + a * b * value)),
        Plant("exp", "exp2", _exp2),
        Plant("sigmoid", "exp2", lambda x: 1 / (1 + _exp2(-x))),
        Plant("silu", "exp2", lambda x: x / (1 + _exp2(-x))),
        Plant("tanh", "exp2", lambda x: 1 - 2 / (_exp2(2 * x) + 1)),
        Plant("_softmax", "exp2", lambda x, dim, half: _softmax(x, dim)),
        Plant("_log_softmax", "exp2", lambda x, dim, half: torch.log2(_softmax(x, dim)) * 0.6931471805599453),
        Plant("add.Tensor", "flushed", lambda x, y, *, alpha=1: flushed(torch.sub(x, y, alpha=-alpha))),
        Plant("sub.Tensor", "flushed", lambda x, y, *, alpha=1: flushed(torch.add(x, y, alpha=-alpha))),
    ]


def _mean(add: Callable[[Tensor], Tensor], x: Tensor, dims: Any, keepdim: bool) -> Tensor:
    total = _sum(add, x, dims, keepdim)
    return total / (x.numel() // max(total.numel(), 1))


def kernel_plant(operator: str, kind: str) -> Plant:
    """A plant around torch's own kernel: its first floating-point result is off by 1 ULP at an edge or in a lane."""
    own = torch.library.get_kernel(f"aten::{operator}", "CPU")

    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        result = own.call_boxed(keys, *args, **kwargs)
        values = result if isinstance(result, (tuple, list)) else [result]
        first = next((v for v in values if isinstance(v, Tensor) and v.is_floating_point() and v.numel()), None)
        if first is not None:
            flat = first.view(-1) if first.dim() == 0 else first
            part = flat[..., -1] if kind == "edge" else flat[..., 3::8]
            part.copy_(torch.nextafter(part, torch.full_like(part, float("inf"))))
        return result

    return Plant(operator, kind, kernel)


def plants_of(archive: Archive) -> Iterator[Plant]:
    """Plants for the operators of an archive, one of each kind in turn."""
    called = list(dict.fromkeys(call["op"].removeprefix("aten.").removesuffix(".default") for call in archive.calls))
    kinds: dict[str, list[Plant]] = {kind: [] for kind in CLASSES}
    for plant in written_plants():
        if plant.operator in called:
            kinds[plant.kind].append(plant)
    for operator in called:
        if not re.search(r"uniform|randn|randint|normal_|_local_scalar|zero|ones|fill|arange|nll|empty", operator):
            for kind in ("edge", "lane"):
                with contextlib.suppress(RuntimeError):  # without a kernel of its own
                    kinds[kind].append(kernel_plant(operator, kind))
    for turn in itertools.zip_longest(*kinds.values()):
        yield from filter(None, turn)


def bytes_of(values: list[Any]) -> list[Any]:
    return [v.contiguous().view(-1).view(torch.uint8).tolist() if isinstance(v, Tensor) else v for v in values]


def changes(plant: Plant, archive: Archive, plain: dict[str, list[Any]]) -> bool:
    """Whether any recorded call of its operator has other bits with the plant, compared here byte by byte."""
    name = f"aten.{plant.operator}"
    calls = [call for call in archive.calls if call["op"] in (name, f"{name}.default")]
    with placed(plant):
        return any(bytes_of(run_call(archive, call)) != plain[call["key"]] for call in calls)


def placed(plant: Plant) -> Any:
    return planted(plant.operator, plant.kernel, with_keyset=plant.kind in ("edge", "lane"))


def recorded(folder: Path, modules: Sequence[Any] = (moved_models,)) -> Iterator[tuple[str, Archive]]:
    for module in modules:
        for model in module.MODELS:
            path = str(folder / model.__name__)
            try:
                if not Path(path, "calls.json").is_file():
                    record(path, f"{module.__file__}:{model.__name__}", [], 1, 1 << 28)
            except Exception as error:  # a release of transformers may want other settings
                print(f"{model.__name__} left out: {error}", file=sys.stderr, flush=True)
                continue
            yield model.__name__, Archive(path)


def truth(folder: Path, wanted: int) -> None:
    """Plant moves, and count answers."""
    counts: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    archives = dict(recorded(folder))
    todo = {name: plants_of(archive) for name, archive in archives.items()}
    plain = {
        name: {call["key"]: bytes_of(run_call(archive, call)) for call in archive.calls}
        for name, archive in archives.items()
    }
    while counts["plants"] < wanted and todo:
        for name in list(todo):
            plant = next(todo[name], None)
            if plant is None:
                del todo[name]
            elif counts["plants"] < wanted and _can(changes, plant, archives[name], plain[name]):
                counts["plants"] += 1
                kinds[plant.kind] += 1
                for answer, text in judged(plant, archives[name], folder / name):
                    counts[answer] += 1
                    if text:
                        print(f"{name} {plant.operator} {plant.kind}: {answer}: {text}", flush=True)
    print(dict(counts))
    print("kinds:", dict(kinds), "models:", len(archives))


def _can(ask: Callable[..., bool], plant: Plant, *given: Any) -> bool:
    try:
        return ask(plant, *given)
    except (RuntimeError, TypeError) as error:  # a kernel that does not take these arguments is no plant
        print(f"not planted: {plant.operator} {plant.kind}: {str(error)[:80]}")
        return False


def judged(plant: Plant, archive: Archive, folder: Path) -> Iterator[tuple[str, str]]:
    """The answers on a plant, each with a text if it is wrong."""
    names = {call["key"]: call["op"] for call in archive.calls}
    with placed(plant):
        rows = replay(archive)["rows"]
        moved = [key for key, row in rows.items() if row["state"] != "equal"]
        now = {call["key"]: probe(archive, call) for call in archive.calls if call["key"] in moved}
    found = {names[key].removeprefix("aten.").removesuffix(".default") for key in moved}
    states = {rows[key]["state"] for key in moved}
    is_named = found == {plant.operator.removesuffix(".default")} and states == {"moved"}
    yield ("named", "") if is_named else ("not named", f"{found} {states}")
    was = {call["key"]: probe(archive, call) for call in archive.calls if call["key"] in moved}
    causes = {cause for key in moved for cause in causes_of(was[key], now[key])}
    if causes:
        is_right = any(word in cause for cause in causes for word in CLASSES[plant.kind])
        yield ("class right", "") if is_right else ("class wrong", f"{causes}")
    else:
        yield "class not stated", ""
    out = folder / "results"
    shutil.rmtree(out, ignore_errors=True)
    kept = keep_results(str(folder), str(out), set(moved), set(), 1 << 28)
    with placed(plant):
        before = run_exchanged(archive, None, set())
        after = run_exchanged(archive, str(out), set(moved))
    if not kept["repeats"]:
        yield "not repeated", "the program differs from itself"
    elif before["equal"]:
        yield "no record changes", ""
    else:
        yield ("exchange EQUAL", "") if after["equal"] else ("exchange DIFFERENT", str(after)[:300])


def quiet(folder: Path, wanted: int) -> None:
    """Replay in environments in which nothing moved: every row that is not equal is wrong."""
    wrong: Counter[str] = Counter()
    archives = []
    for index, (name, _) in enumerate(recorded(folder)):
        archives.append(str(folder / name))
        torch.set_num_threads(1 + (index % 5 == 3))  # of the next model
    folder.chmod(0o755)  # some replays run as another user
    replays = calls = processes = 0
    while replays < wanted:
        prefix, variables = harmless_environments.drawn(random.Random(processes))
        asked = [archives[(replays + index) % len(archives)] for index in range(min(EACH, wanted - replays))]
        command = [*prefix, sys.executable, harmless_environments.__file__, str(START), str(processes), *asked]
        done = run_command(command, 3600, environment={**os.environ, **variables})
        lines = [json.loads(line) for line in done.out.strip().splitlines() if line.startswith("{")]
        assert len(lines) == len(asked), f"{command} {variables}: {done.err[-500:]}"
        for archive, answer in zip(asked, lines, strict=True):
            calls += answer["calls"]
            wrong.update(f"{Path(archive).name}: {row['state']}" for row in answer["wrong"])
            if answer["wrong"]:
                print(f"environment {processes}: {archive} {prefix} {answer['wrong'][0]}", flush=True)
        replays, processes = replays + len(asked), processes + 1
        print(f"{replays} environments in {processes} processes, {calls} calls, {sum(wrong.values())} rows", flush=True)
    print(f"{wanted} environments, {len(archives)} models, {calls} calls three times each: {sum(wrong.values())} rows")
    print(dict(wrong))


def speed(folder: Path, wanted: int) -> None:
    """Record at least so many distinct calls, and replay them in a process of its own."""
    program = folder / "many.py"
    program.write_text(
        f"import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r})\n"
        "import torch\nfrom tests.benchmarks import moved_models as m\n"
        "def run():\n"
        "    for m.DIM in (64, 128, 256):\n"
        "        for m.BATCH in (32, 64):\n"
        "            for m.DTYPE in (torch.float32, torch.bfloat16):\n"
        "                for model in m.MODELS:\n"
        "                    value = model()\n"
        "    return value\n"
    )
    here = Environment()
    asked = {"program": f"{program}:run", "arguments": [], "steps": 1, "budget": 1 << 30}
    began = time.monotonic()
    found = here.ask("record", {"folder": str(folder / "many"), **asked}, 1800)
    text = f"recorded {found['calls']} calls, {found['bytes'] >> 20} MiB in {time.monotonic() - began:.1f} s"
    keys = [call["key"] for call in Archive(str(folder / "many")).calls]
    only = keys[:: max(1, len(keys) // wanted)][:wanted]
    began, spent = time.monotonic(), os.times()
    rows = here.ask("replay", {"folder": str(folder / "many"), "threads": None, "memory": 8 << 30, "only": only}, 1800)
    wall, now = time.monotonic() - began, os.times()
    cpu = now.children_user + now.children_system - spent.children_user - spent.children_system
    took = f"{wall:.1f} s ({cpu:.1f} s of CPU), load {os.getloadavg()[0]:.0f}"
    print(f"{text}; replayed {len(rows['rows'])} three times in {took}")


REPLAY = """
import json, runpy, sys
answer = runpy.run_path(sys.argv[1])["answer"]
for folder in sys.argv[2:]:
    print(json.dumps(answer("replay", {"folder": folder, "threads": None})["rows"]))
"""
"""Replays several archives in one process: importing torch takes longer than a replay."""


def table(folder: Path, environments: list[tuple[str, Environment]], dtypes: list[str]) -> None:
    """Replay the models' calls elsewhere; prints a table of operators that moved, by environment.

    Archives and answers stay in the folder, so that a later call adds an environment to the table.
    """
    paths, modules = {}, [moved_models]
    for needed, module in (("transformers", "moved_transformers"), ("timm", "moved_vision")):
        if importlib.util.find_spec(needed):
            modules.append(importlib.import_module(f"tests.benchmarks.{module}"))
    os.environ.update(MOVED_DIM="128", MOVED_BATCH="32")
    for dtype in dtypes:
        os.environ["MOVED_DTYPE"] = dtype
        for name, archive in recorded(folder / dtype, modules):
            paths[dtype, name] = str(folder / dtype / name)
            print(dtype, name, len(archive.calls), file=sys.stderr, flush=True)
    for name, there in environments:
        command = [there.python, "-c", REPLAY, str(START), *paths.values()]
        done = run_command(command, 3600, environment={**os.environ, **there.variables})
        print(name, done.status, done.err[-300:], file=sys.stderr, flush=True)
        lines = []
        for (dtype, model), text in zip(paths, done.out.strip().splitlines(), strict=True):
            rows = json.loads(text).values()
            lines.append((name, dtype, model, len(rows), [row for row in rows if row["state"] != "equal"]))
        (folder / re.sub(r"[^\w.=+]", "", f"{name}.rows")).write_text(json.dumps(lines))
    found = [line for path in sorted(folder.glob("*.rows")) for line in json.loads(path.read_text())]
    print("\n".join(table_of(sorted(found, key=lambda line: dtypes.index(line[1])))))


def table_of(lines: list[tuple[str, str, str, int, list[dict[str, Any]]]]) -> Iterator[str]:
    """The table in Markdown: a row per environment and operator, a column per dtype."""
    dtypes = list(dict.fromkeys(line[1] for line in lines))
    yield f"| environment | operator | {' | '.join(dtypes)} | smallest shapes |"
    yield "|---" * (len(dtypes) + 3) + "|"
    for name in dict.fromkeys(line[0] for line in lines):
        mine = [line for line in lines if line[0] == name]
        moved = [(dtype, model, row) for _, dtype, model, _, rows in mine for row in rows]
        counts = [
            f"{sum(each == dtype for each, _, _ in moved)} of {sum(line[3] for line in mine if line[1] == dtype)} calls"
            for dtype in dtypes
        ]
        yield f"| {name} | all | {' | '.join(counts)} | |"
        for operator in sorted({row["op"] for _, _, row in moved}):
            rows = [each for each in moved if each[2]["op"] == operator]
            cells = [_cell([(model, row) for each, model, row in rows if each == dtype]) for dtype in dtypes]
            shapes = min((row["shapes"][:2] for _, _, row in rows), key=lambda each: [math.prod(s) for s in each])
            cells.append(f"`{' '.join(map(str, shapes))}`" if shapes else "")
            yield f"| | {operator.removeprefix('aten.')} | {' | '.join(cells)} |"


def _cell(rows: list[tuple[str, dict[str, Any]]]) -> str:
    """The number of models and the largest distance."""
    if not rows:
        return ""
    ulps = max((row["ulps"] for _, row in rows if row.get("ulps") is not None), default=None)
    states = {row["state"] for _, row in rows} - {"moved"}
    far = "" if ulps is None else f", {ulps} ULP" if ulps < 1000 else ", above 1000 ULP"
    models = len({model for model, _ in rows})
    return f"{models} model{'s' * (models > 1)}{far}{''.join(f', {state}' for state in sorted(states))}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("truth", "quiet", "speed", "table"))
    parser.add_argument("--plants", type=int, default=200)
    parser.add_argument("--replays", type=int, default=2000)
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--python", action="append", default=[], metavar="PATH")
    parser.add_argument("--dtype", action="append", default=[])
    parser.add_argument("--folder", type=Path, metavar="DIR", help="keep archives and the table's answers here")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="bench-moved-") as name:
        folder = asked.folder or Path(name)
        if asked.what == "table":
            found = [(f"`{text}`", Environment(variables=dict([text.split("=", 1)]))) for text in asked.env]
            for python in asked.python:
                command = [python, "-c", "import torch; print(torch.__version__)"]
                found.append((f"torch {run_command(command, 600).out.strip()}", Environment(python=python)))
            table(folder, found, asked.dtype or ["float32", "bfloat16"])
        elif asked.what == "truth":
            truth(folder, asked.plants)
        elif asked.what == "quiet":
            quiet(folder / "quiet", asked.replays)
        else:
            speed(folder, asked.calls)


if __name__ == "__main__":
    main()
