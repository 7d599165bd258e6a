"""What is known of operators stands in `harness/operators`; any other table of their names has its reason here."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from bitproof.harness.operators import ROWS

ROOT = Path(__file__).parent.parent
TOPS = ("bitproof", "cases", "harness", "reference")
NAMESPACES = {row.partition(".")[0] for row in ROWS if not row.startswith("_operator")} | {"prims", "c10d"}
NAMES = {row.partition(".")[2] for row in ROWS} - {"*", "cpu", "cuda", "size", "t", "dim"}  # "cpu" is a device, too

PATTERN = "the calls in one place of a graph that the fault looks for, or writes"
ALLOWED = {
    "harness/case/case_parts.py": (2, "what a case may do with activations"),
    "harness/certificate_checker.py": (26, "a checker that shares nothing, compared with the prover by test_tables.py"),
    "harness/disturb/deferred_work.py": (1, "torch's own messages to one rank, whose names a fault must know"),
    "harness/disturb/faults/chunking.py": (1, PATTERN),
    "harness/disturb/faults/gradients.py": (1, PATTERN),
    "harness/disturb/faults/moe.py": (1, PATTERN),
    "harness/disturb/faults/numerics.py": (1, PATTERN),
    "harness/disturb/faults/ranks.py": (2, PATTERN),
    "harness/graph/analysis/parameters.py": (1, "what FSDP writes before a gather"),
    "harness/graph/passes/bucket.py": (1, "what FSDP writes behind a reduction"),
    "harness/graph/staged/once_a_step.py": (1, "what moves a gradient's elements on the way to its reduction"),
    "harness/graph/graph_json.py": (1, "Python's arithmetic on sizes, by the names in a file"),
    "harness/powers/proofs/prover/programs/one_by_one.py": (
        2,
        "what runs in place of an operator over lists: code, by operator",
    ),
    "harness/localize/logs/joined_logs.py": (1, "names in a log, of torch's own messages to one rank"),
    "harness/powers/moved/standalone/allowed_calls.py": (
        2,
        "operators with effects and operators that overwrite, for a Python without bitproof",
    ),
    "harness/powers/moved/standalone/order_probes.py": (9, "which probe asks which operator, for the same Python"),
    "harness/powers/proofs/prover/known_operators.py": (
        10,
        "operators that hand on a value, take one dtype, choose elements or may mix dtypes, as a test tries of each",
    ),
    "harness/powers/proofs/prover/rules.py": (2, "rules by the kind of a term, and which terms have signs"),
    "harness/powers/sensitivity/formulas.py": (3, "which formula computes an operator otherwise: code, by operator"),
    "harness/torch_sizes.py": (1, "what torch's sizes compute, by the names of its methods"),
    "reference/layers/router.py": (2, "the scores that a router may have, as a case names them"),
}


def tables(source: str) -> list[int]:
    """The lines on which collections stand whose members are operators, two or more and at least half of them."""
    found, inner = [], set()
    for node in ast.walk(ast.parse(source)):
        is_split = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "split"
        if isinstance(node, ast.Set | ast.Tuple | ast.List | ast.Dict) and node not in inner:
            inner |= {*ast.walk(node)}
            members = [*_members(node)]
        elif is_split and isinstance(text := node.func.value, ast.Constant) and isinstance(text.value, str):
            members = [ast.Constant(word) for word in text.value.split()]
        else:
            continue
        num_operators = sum(map(_is_operator, members))
        if num_operators > 1 and 2 * num_operators >= len(members):
            found.append(node.lineno)
    return found


def _members(node: ast.AST) -> Iterator[ast.AST]:
    match node:
        case ast.Set(elts) | ast.Tuple(elts) | ast.List(elts):
            for each in elts:
                yield from _members(each)
        case ast.Dict(keys):  # what it says of operators
            yield from (key for key in keys if key is not None)
        case ast.Starred(value):
            yield from _members(value)
        case _:
            yield node


def _is_operator(node: ast.AST) -> bool:
    if isinstance(node, ast.Constant):
        namespace, _, name = str(node.value).partition(".")
        is_full = namespace in NAMESPACES - {"torch", "bitproof"} and name.replace(".", "_").isidentifier()
        return node.value in NAMES or is_full
    text = ast.unparse(node).removeprefix("torch.ops.")
    return isinstance(node, ast.Attribute) and text.partition(".")[0] in NAMESPACES - {"torch"} and "." in text


def test_no_file_but_the_table_has_a_table_of_operators() -> None:
    files = [path for top in TOPS for path in (ROOT / top).rglob("*.py") if not _is_linked(path)]
    assert len(files) > 300
    found = Counter[str]()
    for path in files:
        if (ROOT / "harness" / "operators") not in path.parents:
            found[str(path.relative_to(ROOT))] += len(tables(path.read_text()))
    assert +found == {path: count for path, (count, _) in ALLOWED.items()}, (
        "make it a column of harness/operators/row.py, or give the file its reason here"
    )


def _is_linked(path: Path) -> bool:
    return any(parent.is_symlink() for parent in path.parents if parent != ROOT)


def test_tables_are_seen_in_every_form_and_what_is_none_is_not() -> None:
    for source in (
        'VIEWS = {"view", "permute"}',
        "VIEWS = frozenset({aten.view.default, aten.permute.default})",
        "VIEWS = [torch.ops.aten.view.default, torch.ops.aten.t.default]",
        'RULES = {"view": 1, "permute": 2, "mine": 3}',
        'RULES = "view permute".split()',
        'if name in ("mm", *("bmm", "addmm")): pass',
        'EXACT = {"aten.of_tomorrow.default", "aten.add.Tensor"}',
    ):
        assert tables(source) == [1], source
    for source in ('x = ("view",)', 'x = {"cpu", "cuda"}', 'x = {"view", "loss", "grad", "param", "sum"}'):
        assert tables(source) == [], source
