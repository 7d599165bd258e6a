"""Files of plain Python made of two small graphs, each run as a reader would run it."""

from __future__ import annotations

import inspect
import linecache
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from bitproof.harness.graph.offload_operators import OFFLOAD
from bitproof.harness.graph.tracing.trace import StepGraph
from bitproof.harness.powers.shrink.standalone import NoFileError, Scene, Side, Written, run_plain, write_standalone
from bitproof.harness.powers.shrink.standalone.template import describe_difference

pytestmark = pytest.mark.ranks

NAMES = {"parameters": ["layers.0.w"], "buffers": ["count"], "inputs": ["tokens"]}
HEAD = 'A """head\\N" of C:\\U.'
TOKENS = torch.tensor([3, 1, 2])


def graph_of(step: Callable[..., list[Tensor]]) -> GraphModule:
    """A step of a parameter, a buffer and tokens, traced: a loss and one gradient."""
    return make_fx(step, tracing_mode="fake")(torch.zeros(4, 3), torch.zeros(3), TOKENS)


def scene(reference: Any, candidate: Any, world_size: int = 1, source: str = "") -> Scene:
    graphs = {"reference": reference, "candidate": candidate}
    sides = {
        name: Side.of(
            StepGraph(graph, NAMES["parameters"], NAMES["buffers"], 1),
            NAMES["inputs"],
        )
        for name, graph in graphs.items()
    }
    ranks = [list(range(world_size))]
    return Scene(sides, world_size, {"all": ranks}, [{"tokens": TOKENS}] * world_size, HEAD, source, timeout=60.0)


def run_forked(text: str, folder: Path, timeout: float, *arguments: str) -> tuple[int, str]:
    """Run a file in a fork of this process, which has loaded torch."""
    output = folder / "output"
    if (pid := os.fork()) == 0:
        sys.argv = ["file.py", *arguments]
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115 (it lives as long as the process)
        linecache.cache["file.py"] = (len(text), None, text.splitlines(keepends=True), "file.py")
        status = 3
        try:
            exec(compile(text, "file.py", "exec"), {"__name__": "__main__"})
        except SystemExit as end:
            status = int(str(end.code))
        finally:
            sys.stdout.flush()
            os._exit(status)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status), output.read_text()


def write(scene: Scene) -> Written:
    return write_standalone(scene, run_forked)


def body(text: str, side: str) -> list[str]:
    """The lines of one of a file's functions, without its comments."""
    lines = text.split(f"def {side}(")[1].split("\n\n\n")[0].splitlines()[1:]
    return [line.strip() for line in lines if not line.strip().startswith("#")]


def rows(w: Tensor, tokens: Tensor) -> Tensor:
    return w[tokens].exp()


def right(w: Tensor, count: Tensor, tokens: Tensor) -> list[Tensor]:
    count.add_(tokens)
    y = rows(w, tokens)
    return [y.sum(), y * 2]


def wrong(w: Tensor, count: Tensor, tokens: Tensor) -> list[Tensor]:
    count.add_(tokens)
    y = rows(w, tokens)
    return [y.sum(), (y + 1e-3) * 2]


def test_the_file_has_the_calls_that_matter_alone_and_fails_by_itself(tmp_path: Path) -> None:
    written = write(scene(graph_of(right), graph_of(wrong)))
    assert written.num_calls == {"reference": 1, "candidate": 2}
    assert body(written.text, "reference") == [
        "mul = torch.ops.aten.mul.Tensor(x0, 2)",
        "return {'grad layers.0.w': mul}",
    ]
    assert body(written.text, "candidate") == [
        "add = torch.ops.aten.add.Tensor(x0, 0.001)",
        "mul = torch.ops.aten.mul.Tensor(add, 2)",
        "return {'grad layers.0.w': mul}",
    ]
    assert re.fullmatch(
        r"rank 0: grad layers.0.w: 9 of 9 elements differ; element 0 is 0x\w{8} against 0x\w{8}\n"
        r"reference and candidate differ\n",
        written.printed,
    )
    imported = set(re.findall(r"^(?:import|from) (\w+)", written.text, re.MULTILINE))
    assert imported - {"torch"} <= sys.stdlib_module_names
    mended = written.text.replace("add = torch.ops.aten.add.Tensor(x0, 0.001)", "add = x0")
    assert run_forked(mended, tmp_path, 60.0) == (0, "reference and candidate agree in every bit\n")


def test_a_file_that_shows_nothing_is_not_handed_out() -> None:
    def run(text: str, *others: Any) -> tuple[int, str]:
        return run_forked(text, *others) if "see(" in text else (0, "")

    with pytest.raises(NoFileError) as refusal:
        write_standalone(scene(graph_of(right), graph_of(wrong)), run)
    assert refusal.value.what == "a file with the code of both graphs was written, and ran without showing a difference"


def test_a_file_runs_without_this_project_and_its_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path.cwd()))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    text = "import os, sys; print(sys.argv[1], {'PYTHONPATH', 'OMP_NUM_THREADS'} & set(os.environ)); sys.exit(1)"
    assert run_plain(text, tmp_path, 60.0, "word") == (1, "word set()\n")
    status, printed = run_plain("import time; time.sleep(60)", tmp_path, 0.2)
    assert (status, printed) == (None, "not finished after 0.2 s")


def test_graphs_that_agree_give_no_file() -> None:
    with pytest.raises(NoFileError) as refusal:
        write(scene(graph_of(right), graph_of(right)))
    assert refusal.value.what == "the two graphs agree in every bit: the difference is not in their code"


def test_a_buffer_that_is_written_into_is_followed_through_every_write() -> None:
    def forgets(w: Tensor, count: Tensor, tokens: Tensor) -> list[Tensor]:
        y = rows(w, tokens)
        return [y.sum(), y * 2]

    def counts_twice(w: Tensor, count: Tensor, tokens: Tensor) -> list[Tensor]:
        count.add_(tokens)
        return right(w, count, tokens)

    once, never, twice = map(graph_of, (right, forgets, counts_twice))
    written = write(scene(once, twice))
    assert written.num_calls == {"reference": 1, "candidate": 2}
    assert "return {'buffer count': count_0}" in body(written.text, "candidate")
    written = write(scene(once, never))
    assert written.num_calls == {"reference": 1, "candidate": 0}


def test_ranks_that_exchange_values_are_processes_of_the_file() -> None:
    ops = torch.ops._c10d_functional

    def exchanging(scale: float) -> GraphModule:
        def step(w: Tensor, count: Tensor, tokens: Tensor) -> list[Tensor]:
            total = ops.wait_tensor(ops.all_reduce(w * scale, "sum", "all"))
            return [total.sum(), w.clone()]

        return graph_of(step)

    source = inspect.getsource(__import__("bitproof.reference.parallel.rank_order_group", fromlist=["x"]))
    written = write(scene(exchanging(2.0), exchanging(1.5), 3, source[source.index("class _Finish") :]))
    assert written.num_calls == {"reference": 4, "candidate": 4}
    assert "GROUPS = {\n    'all': [[0, 1, 2]],\n}" in written.text
    assert "wrap_group = RankOrderGroup" in written.text, "three ranks' sums have an order"
    assert sorted(line[:6] for line in written.printed.splitlines()) == ["rank 0", "rank 1", "rank 2", "refere"]


@pytest.mark.parametrize(
    ("target", "name"), [(describe_difference, "describe_difference"), (OFFLOAD, "bitproof.offload.default")]
)
def test_what_plain_torch_does_not_have_is_refused_by_name(target: Any, name: str) -> None:
    graph = graph_of(right)
    node = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.exp.default)[0]
    node.target = target
    with pytest.raises(NoFileError) as refusal:
        write(scene(graph_of(right), graph))
    assert refusal.value.what == f"a graph has `exp`, a call_function of {name}, which plain torch does not have"


def test_code_that_does_not_run_by_itself_is_refused_with_what_it_printed() -> None:
    graph = graph_of(right)
    node = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.exp.default)[0]
    node.args = ("text",)
    with pytest.raises(NoFileError) as refusal:
        write(scene(graph_of(right), graph))
    assert refusal.value.what == "the code of both graphs does not run by itself"
    assert "aten::exp" in str(refusal.value.found)
