"""Writes a script with a user's two systems. The script starts ranks, runs both and compares them, without bitproof.

1. The ranks of each system are processes, joined by gloo, with the same seeds and settings as under bitproof.
2. Each rank saves the tensors that its system reports at every step.
3. The tensors of both systems are compared, bit for bit.

`alone_text` assembles the file from the user's files and the functions below, which may use only torch, the standard
library and functions of `template`. A system that needs more of bitproof fails in such a file.
"""

from __future__ import annotations

import importlib
import inspect
import multiprocessing
import os
import random
import re
import sys
import tempfile
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from pprint import pformat
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bitproof.harness.case import Case
from bitproof.harness.powers.shrink.copied_files import OwnFiles
from bitproof.harness.powers.shrink.shrunk_report import docstring
from bitproof.harness.powers.shrink.standalone import simple_watch, template
from bitproof.harness.powers.shrink.standalone.template import describe_difference, print_status

FILES: dict[str, str] = {}
SYSTEMS: dict[str, tuple[str, str, str]] = {}
CASE: dict[str, Any] = {}


def namespace_of(fields: Any, name: str = "") -> Any:
    """Return the case's fields as attributes of nested namespaces; `options` stays a dictionary."""
    if not isinstance(fields, dict) or name == "options":
        return fields
    return SimpleNamespace(**{name: namespace_of(field, name) for name, field in fields.items()})


def takes(function: Any, *arguments: Any) -> bool:
    """Whether `function` can be called with these arguments."""
    try:
        inspect.signature(function).bind(*arguments)
    except (TypeError, ValueError):
        return False
    return True


def take_steps(made: Any, keep: Callable[..., None]) -> None:
    """Run all steps of a system, and pass the tensors of each step to `keep`.

    Raises NotImplementedError for a system that renames its tensors.
    """
    if getattr(made, "names", None):
        raise NotImplementedError("the system renames its tensors")
    if hasattr(made, "take_steps"):
        return made.take_steps(CASE["steps"], lambda index: nullcontext(partial(keep, index)))
    step = getattr(made, "step", made)
    for index in range(CASE["steps"]):
        shown = step(index, partial(keep, index)) if takes(step, 0, print) else step(index)
        for kind, name, tensor in shown or ():
            keep(index, kind, name, tensor)


def run_rank(side: str, rank: int, folder: str) -> None:
    """Run a rank of the system `side`, and save the tensors that it reports. Exits with 0, or with 2 after an error."""
    try:
        world_size = CASE["parallelism"]["world_size"]
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
        os.environ |= {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
        store = dist.FileStore(os.path.join(folder, f"{side}.store"), world_size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        root, module, names = SYSTEMS[side]
        sys.path[:0] = [os.path.join(folder, root), folder]
        factory: Any = importlib.import_module(module)
        for name in names.split("."):
            factory = getattr(factory, name)
        random.seed(CASE["seed"])
        torch.manual_seed(CASE["seed"])
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(CASE["seed"] % 2**32)
        case = namespace_of(CASE)
        mesh = SimpleNamespace(rank=rank, device=torch.device("cpu"), parallelism=case.parallelism)
        shown: dict[str, Tensor] = {}

        def keep(index: int, kind: str, name: str, tensor: Any) -> None:
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            shown[f"step {index}: {kind} {name}"] = local.detach().clone()

        take_steps(factory() if takes(factory) and not takes(factory, case, mesh) else factory(case, mesh), keep)
        torch.save(shown, os.path.join(folder, f"{side}{rank}.pt"))
        dist.barrier()
        os._exit(0)
    except BaseException:
        os.write(1, traceback.format_exc().encode())
        os._exit(2)


def differing(first: dict[str, Tensor], second: dict[str, Tensor]) -> dict[str, str]:
    """Return the tensors that differ between the two systems, by name, each with the difference in words."""
    found = {name: "only one side has it" for name in [*first, *second] if (name in first) != (name in second)}
    for name in first:
        if name in second and (difference := describe_difference(first[name], second[name])):
            found[name] = difference
    return found


def compare_systems() -> int:
    """Run both systems on all ranks. Returns 1 if they differ on any rank, 2 if a rank fails, else 0."""
    ranks, found = range(CASE["parallelism"]["world_size"]), []
    with tempfile.TemporaryDirectory() as folder:
        for name, text in FILES.items():
            Path(folder, name).parent.mkdir(parents=True, exist_ok=True)
            Path(folder, name).write_text(text, encoding="utf-8")
        fork = multiprocessing.get_context("fork")
        running = [
            fork.Process(target=run_rank, args=(side, rank, folder), daemon=True) for side in SYSTEMS for rank in ranks
        ]
        for each in running:
            each.start()
        for each in running:
            each.join(300)
        if any(each.exitcode != 0 for each in running):
            return print_status(2)
        for rank in ranks:
            sides = [torch.load(os.path.join(folder, f"{side}{rank}.pt"), weights_only=True) for side in SYSTEMS]
            found += [f"rank {rank}, {name}: {difference}" for name, difference in differing(*sides).items()]
    for line in [*found[:9], *([f"... and {len(found) - 9} more"] if len(found) > 9 else [])]:
        print(line)
    return print_status(int(bool(found)))


_SETTINGS = """    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
"""
_PARTS: list[Callable[..., Any]] = [
    template.bytes_of,
    template.describe_difference,
    template.print_status,
    namespace_of,
    takes,
    take_steps,
    run_rank,
    differing,
    compare_systems,
]
_IMPORTS = """import importlib
import inspect
import multiprocessing
import os
import random
import sys
import tempfile
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor"""


def alone_text(head: str, case: Case, own: OwnFiles) -> str:
    """Return the text of a file that contains and compares a case's two systems, without bitproof.

    `own` has the user's files with the systems, and `head` becomes the file's docstring.
    """
    texts = dict(own.texts)
    if any(re.search(r"^\s*(import|from) bitproof\b", text, re.MULTILINE) for text in texts.values()):
        # The user's files import `watch` from bitproof, which the file must not need.
        texts["bitproof/__init__.py"] = Path(simple_watch.__file__).read_text("utf-8")
    values = case.to_dict()
    systems = {side: _import_path_of(own.names[values.pop(side)]) for side in ("reference", "candidate")}
    files = "".join(f"    {name!r}: {docstring(text)},\n" for name, text in texts.items())
    tables = f"SYSTEMS = {pformat(systems, width=110)}\nCASE = {pformat(values, width=110, sort_dicts=False)}"
    blocks = [
        f"{docstring(head)}\n\nfrom __future__ import annotations\n\n{_IMPORTS}",
        f"FILES = {{\n{files}}}\n{tables}",
        *map(inspect.getsource, _PARTS),
        f'if __name__ == "__main__":\n{_SETTINGS}    sys.exit(compare_systems())',
    ]
    return "\n\n\n".join(block.strip("\n") for block in blocks) + "\n"


def _import_path_of(name: str) -> tuple[str, str, str]:
    """Split `FILE.py:NAME` into three parts: folder for the import path, module, and name in the module.

    For example, "0/train/loop.py:make" becomes ("0", "train.loop", "make").
    """
    file, _, factory = name.rpartition(":")
    first, _, rest = file.partition("/")
    # `own_files` gives every root but the first a numbered folder.
    root, path = (first, rest) if first.isdigit() else (".", file)
    return root, path.removesuffix(".py").replace("/", "."), factory
