"""The file as a text: its head, its tables, and no more of what is the same in every file than it needs."""

from __future__ import annotations

import ast

from torch.fx import Node

from bitproof.harness.powers.shrink.standalone.rendering import render
from tests.harness.powers.shrink.standalone.test_standalone import HEAD, graph_of, right, scene, wrong


def nothing_is_known(side: str, node: Node) -> bool:
    return False


def test_a_file_is_python_with_its_head_above_two_functions_of_the_same_inputs() -> None:
    text, num_calls = render(scene(graph_of(right), graph_of(wrong)), ["loss"], nothing_is_known, False)
    tree = ast.parse(text)
    assert ast.get_docstring(tree) == HEAD.replace('"""', "'''")
    arguments = {
        node.name: [argument.arg for argument in node.args.args]
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name in ("reference", "candidate")
    }
    assert arguments == {side: ["layers_0_w_0", "tokens_1"] for side in ("reference", "candidate")}
    assert num_calls == {"reference": 3, "candidate": 3}


def test_a_file_on_one_rank_has_neither_groups_nor_a_probe() -> None:
    stage = scene(graph_of(right), graph_of(wrong))
    text, _ = render(stage, ["loss"], nothing_is_known, False)
    assert "GROUPS" not in text and "see(" not in text and "torch.distributed" not in text
    text, _ = render(stage, ["loss"], nothing_is_known, True)
    assert "GROUPS = {\n}" in text and "    see('exp', exp)" in text and "def see(" in text
