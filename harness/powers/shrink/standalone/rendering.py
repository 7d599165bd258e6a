"""Assembles a self-contained file: two functions, tables of their inputs, and the functions of `template`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.fx import Node

from bitproof.harness.graph.operators import group_name, is_collective
from bitproof.harness.operators import names
from bitproof.harness.powers.shrink.standalone import probe, template
from bitproof.harness.powers.shrink.standalone.reading import Input, Scene, input_of
from bitproof.harness.powers.shrink.standalone.statements import function_text
from bitproof.harness.torch_operators import base_name_of

_SUMS = names(lambda row: row.sums_ranks)


def render(
    scene: Scene, outputs: Sequence[str], is_known: Callable[[str, Node], bool], probing: bool
) -> tuple[str, dict[str, int]]:
    """Return a pair: the text of a file that computes `outputs` by both graphs, and the number of calls of each graph.

    - `is_known`: whether a graph's node becomes an input of the file.
    - `probing`: the file saves all values, and compares nothing.
    """
    inputs: dict[Any, Input] = {}
    functions, num_calls, collectives = [], {}, []
    for name in scene.sides:
        side = scene.sides[name]
        wanted = {output: side.outputs[output] for output in outputs}
        calls, given = side.walk(list(wanted.values()), lambda node, name=name: is_known(name, node))  # type: ignore[misc]
        names = {node: node.name for node in calls}
        for node in given:
            # Both sides share an input if it is the same placeholder, or has the same digests on all ranks.
            key = side.placeholders.get(node) or tuple(rank["values"][name][node.name][0] for rank in scene.seen)
            if key not in inputs:
                inputs[key] = input_of(scene, name, node, len(inputs))
            names[node] = inputs[key].name
        functions.append(function_text(name, calls, names, wanted, probing))
        num_calls[name] = len(calls)
        collectives += [node for node in calls if is_collective(node)]
    arguments = ", ".join(entry.name for entry in inputs.values())
    # Both functions take all inputs, which are known only now.
    text = "\n\n\n".join(function.replace("(INPUTS)", f"({arguments})") for function in functions)
    return _file(scene, list(inputs.values()), text, collectives, probing), num_calls


def _file(scene: Scene, inputs: Sequence[Input], functions: str, collectives: Sequence[Node], probing: bool) -> str:
    groups = {group_name(node): scene.partitions[group_name(node)] for node in collectives}
    tables = [f"WORLD_SIZE = {scene.world_size}", _INPUTS_ARE]
    tables += ["INPUTS = {", *(entry.line for entry in inputs), "}"]
    parts: list[Callable[..., Any]] = [*_FUNCTIONS, template.print_status]
    compare: Callable[[], int] = template.compare_alone
    imports, names = _IMPORTS, _NAMES
    # Without collectives, a single process can compute all ranks, one after another. The probe always uses a process
    # for each rank, as each writes a file.
    if groups or probing:
        tables += ["GROUPS = {", *(f"    {name!r}: {[list(p) for p in parts]}," for name, parts in groups.items()), "}"]
        tables += ["", "", _wrap_group(scene, groups, collectives)]
        parts.append(template.run_rank)
        compare = template.compare_together
        imports, names = sorted({*_IMPORTS, *_MORE_IMPORTS}), _MORE_NAMES
    probing_parts = [f"{_PROBE_IMPORTS}\n\nLARGEST = {probe.LARGEST}\nseen = {{}}"] if probing else []
    probing_parts += [inspect.getsource(part) for part in (probe.see, probe.differs_on) if probing]
    imported = "\n".join(f"import {name}" for name in imports)
    head = scene.head.replace("\\", "\\\\").replace('"""', "'''")
    blocks = [
        f'"""{head}"""\n\nfrom __future__ import annotations\n\n{imported}\n{names}',
        "\n".join(tables),
        functions,
        *map(inspect.getsource, parts),
        *probing_parts,
        inspect.getsource(compare),
        f'if __name__ == "__main__":\n{_SETTINGS}    sys.exit({compare.__name__}())',
    ]
    return "\n\n\n".join(block.strip("\n") for block in blocks) + "\n"


def _wrap_group(scene: Scene, groups: Mapping[str, Any], collectives: Sequence[Node]) -> str:
    """Return the source code of the file's function `wrap_group`, which takes a process group of gloo.

    If a sum is over more than two ranks, the function returns a group that adds in rank order, otherwise gloo's group.
    """
    sums = [group_name(node) for node in collectives if base_name_of(node.target) in _SUMS]
    if any(len(groups[name][0]) > 2 for name in sums):
        return f"{scene.ordered_group}\n\nwrap_group = RankOrderGroup"
    return "def wrap_group(group):\n    return group"


_FUNCTIONS: list[Callable[..., Any]] = [
    template.make_input,
    template.compute,
    template.bytes_of,
    template.describe_difference,
    template.differs_on,
]
_IMPORTS = ["base64", "math", "operator", "os", "sys", "traceback", "zlib"]
_MORE_IMPORTS = ["multiprocessing", "tempfile"]
_PROBE_IMPORTS = "import hashlib\nimport json"
_NAMES = "from typing import Any\n\nimport torch\nfrom torch import Tensor"
_MORE_NAMES = """from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives
from torch import Tensor
from torch.distributed.distributed_c10d import ReduceOp, Work"""
_INPUTS_ARE = (
    "# dtype, shape, strides, and the content on all ranks, or on each: numbers, packed bytes, or drawn where empty."
)
_SETTINGS = """    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on this machine
"""
