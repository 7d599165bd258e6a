"""What a dump holds: every graph as text, what each pass changed, and torch's own structured trace."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import pytest
import torch
from torch._logging._internal import trace_log
from torch.fx import GraphModule

from bitproof.harness.graph.dump import GraphDump
from bitproof.harness.graph.pipeline import build_pipeline, run_pipeline
from tests.harness.graph.graphs import Applied, D, Layers, Sketch, context_of, parameter, trace

aten = torch.ops.aten


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The dump of a chunked step: one layer that multiplies."""
    folder = tmp_path_factory.mktemp("dump") / "toy"
    joint = trace(Layers(Applied(lambda m, x: x * m.w, w=parameter(D))))
    context = context_of(joint, "layers.*")
    with GraphDump(folder, joint.parameter_names, joint.buffer_names) as dump:
        run_pipeline(joint.module, build_pipeline(context), context, dump)
    return folder


def write(folder: Path, module: GraphModule, *parameter_names: str) -> None:
    with GraphDump(folder, parameter_names, []) as dump:
        dump("traced", module)


def test_files_are_numbered_in_the_order_of_the_column(folder: Path) -> None:
    assert sorted(path.name for path in folder.iterdir()) == [
        "00-traced.txt",
        "01-clean_up.diff",
        "01-clean_up.txt",
        "02-chunk.diff",
        "02-chunk.txt",
        "03-concretize_symbols.diff",
        "03-concretize_symbols.txt",
        "04-measure_memory.diff",
        "04-measure_memory.txt",
        "tlparse",
    ]


def test_a_text_has_a_line_a_node_below_headlines(folder: Path) -> None:
    text = re.sub(r"\S*graphs/?\S*\.py:\d+|tests/\S+:\d+", "FILE", (folder / "02-chunk.txt").read_text())
    head = text.split("\n\n# no module (forward)")[0].splitlines()
    assert head[:5] == [
        "# placeholders",
        "arg0_1 = input -> float32[8]  # parameter layers.0.w",
        "arg1_1 = input -> float32[4, 6, 8]  # input",
        "",
        "# layers.0 (forward), chunk 0",
    ]
    assert "\n# layers.0 (forward), chunk 1\nmul_chunk1 = aten.mul.Tensor(" in text
    assert text.splitlines()[-2].startswith("return mean") and text.splitlines()[-2].endswith("  # loss")
    assert text.splitlines()[-1].endswith("  # gradient layers.0.w")
    assert text.splitlines()[-3] == "# outputs"


def test_a_diff_leads_from_one_text_to_the_next(folder: Path) -> None:
    old, new = ((folder / f"{name}.txt").read_text().splitlines() for name in ("01-clean_up", "02-chunk"))
    diff = (folder / "02-chunk.diff").read_text().splitlines()
    assert diff[:2] == ["--- 01-clean_up.txt", "+++ 02-chunk.txt"]
    assert patched(old, diff[2:]) == new != old


def test_the_diff_of_a_pass_that_changed_nothing_is_empty(folder: Path) -> None:
    assert (folder / "03-concretize_symbols.diff").read_text() == ""
    assert (folder / "03-concretize_symbols.txt").read_text() == (folder / "02-chunk.txt").read_text()


def patched(lines: list[str], diff: list[str]) -> list[str]:
    """What a unified diff makes of `lines`; they must be the lines that it was made from."""
    rest, result = list(lines), []
    for line in diff:
        if line.startswith("@@"):
            start = int(line.split()[1].split(",")[0].lstrip("-"))
            while len(lines) - len(rest) < start - 1:
                result.append(rest.pop(0))
            continue
        if line[0] != "+":
            assert rest.pop(0) == line[1:]
        if line[0] != "-":
            result.append(line[1:])
    return result + rest


def test_the_structured_trace_parses_line_by_line(folder: Path) -> None:
    (log,) = (folder / "tlparse").iterdir()
    assert re.fullmatch(r"dedicated_log_torch_trace_\w+\.log", log.name)
    glog = re.compile(r"V\d{4} \d\d:\d\d:\d\d\.\d{6} \d+ \S+:\d+\] (\{.*\})")
    artifacts: list[tuple[dict, list[str]]] = []
    for line in log.read_text().splitlines():
        if line.startswith("\t"):
            artifacts[-1][1].append(line[1:])
        else:
            match = glog.fullmatch(line)
            assert match, line
            artifacts.append((json.loads(match[1]), []))
    payloads = {about["artifact"]["name"]: "\n".join(lines) for about, lines in artifacts}
    for about, lines in artifacts:
        assert about["has_payload"] == hashlib.md5("\n".join(lines).encode()).hexdigest()
    # torch adds its own from 2.12 on.
    assert [name for name in payloads if name != "torch_version"] == [
        "00-traced",
        "01-clean_up",
        "02-chunk",
        "03-concretize_symbols",
        "04-measure_memory",
    ]
    for name in ("00-traced", "02-chunk"):
        assert payloads[name] + "\n" == (folder / f"{name}.txt").read_text()


def test_torchs_trace_is_left_as_it_was(folder: Path, tmp_path: Path) -> None:
    sketch = Sketch()
    before = list(trace_log.handlers)
    write(tmp_path, sketch.finish(sketch.call(aten.sin.default, sketch.placeholder("x", 4))))
    assert set(trace_log.handlers) <= set(before)


def test_values_show_dtype_shape_and_strides_that_are_not_contiguous(tmp_path: Path) -> None:
    sketch = Sketch()
    x = sketch.placeholder("x", sketch.n, 6, dtype=torch.bfloat16)
    flipped = sketch.call(aten.t.default, x)
    size = sketch.call(aten.sym_size.int, x, 0)
    both = sketch.call(aten.split.Tensor, flipped, 3, backward=True)
    filled = sketch.call(aten.full.default, [2], 1.5, dtype=torch.float64, at=None)
    write(tmp_path, sketch.finish(filled, size, both), "w")
    assert (tmp_path / "00-traced.txt").read_text().splitlines() == [
        "# placeholders",
        "x = input -> bfloat16[u0, 6]  # parameter w",
        "",
        "# layers.0 (forward)",
        "t = aten.t.default(x) -> bfloat16[6, u0] strides [1, 6]  # layers.0 (forward)",
        "sym_size = aten.sym_size.int(x, 0) -> SymInt u0  # layers.0 (forward)",
        "",
        "# layers.0 (backward)",
        "split = aten.split.Tensor(t, 3) -> (bfloat16[3, u0] strides [1, 6], bfloat16[3, u0] strides [1, 6])"
        "  # layers.0 (backward)",
        "",
        "# no module (forward)",
        "full = aten.full.default([2], 1.5, dtype=torch.float64) -> float64[2]  # no module (forward)",
        "",
        "# outputs",
        "return full  # loss",
        "return sym_size  # gradient w",
        "return split",
    ]


def test_a_nested_graph_stands_below(tmp_path: Path) -> None:
    inner, sketch = Sketch(), Sketch()
    body = inner.finish(inner.call(aten.sin.default, inner.placeholder("y", 4)))
    sketch.attribute("body", body)
    write(tmp_path, sketch.finish(sketch.call(aten.neg.default, sketch.placeholder("x", 4))))
    text = (tmp_path / "00-traced.txt").read_text()
    assert "body = self.body  # layers.0 (forward)\n" in text
    assert text.endswith(
        "\n\n## nested graph body\n\n# placeholders\ny = input -> float32[4]  # input\n\n# layers.0 (forward)\n"
        "sin = aten.sin.default(y) -> float32[4]  # layers.0 (forward)\n\n# outputs\nreturn sin\n"
    )


def test_a_graph_without_metadata_can_be_read_too(tmp_path: Path) -> None:
    sketch = Sketch()
    module = sketch.finish(sketch.call(aten.neg.default, sketch.placeholder("x", 4)))
    for node in module.graph.nodes:
        node.meta.clear()
    write(tmp_path, module)
    assert "neg = aten.neg.default(x)  # no module (forward)" in (tmp_path / "00-traced.txt").read_text()


def test_a_device_is_reported_where_it_is_not_the_cpu(tmp_path: Path) -> None:
    sketch = Sketch()
    x = sketch.placeholder("x", 4)
    x.meta["val"] = torch.empty(4, device="meta")
    write(tmp_path, sketch.finish(x))
    assert "x = input -> float32[4] on meta  # input" in (tmp_path / "00-traced.txt").read_text()
