"""Models given to torch.compile with our backend: the graphs that come out, their bits, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import bitproof
from bitproof.harness.case import Parallelism, Pipeline
from bitproof.harness.errors import CaseError, PassError, UsageError
from bitproof.harness.execute.folders import CaseFolders
from bitproof.harness.graph.graph_options import GraphOptions, check_extra_passes
from bitproof.harness.graph.origin import META_KEY, Origin, origin_of
from bitproof.harness.localize.logs.call_log import logged
from bitproof.harness.powers.shrink.bisect_passes import check_case
from bitproof.harness.systems import compiled
from bitproof.harness.systems.compiled import KernelGraph, compile_models
from bitproof.harness.systems.registry import check_system
from bitproof.harness.within_user_code import refusals_raised

# Dynamo asks a value behind a graph break whether it has one.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")

PASSES = """
import torch

def nothing(module):
    pass

def other_gelu(module):
    for node in module.graph.find_nodes(op="call_function", target=torch.ops.aten.gelu.default):
        node.kwargs = {"approximate": "tanh"}
"""

TRAINER = """
import bitproof
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x):
        return nn.functional.gelu(self.up(x))


def plain():
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), Block()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(dist.get_rank())

    def step(index):
        loss = model(torch.randn(4, 8, generator=data)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return bitproof.watch(step, model=model, optimizer=optimizer)
"""


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(4, 4)

    def forward(self, x):
        return nn.functional.gelu(self.up(x))


class Broken(nn.Module):
    """Two blocks with a graph break between."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        x = self.blocks[0](x)
        torch._dynamo.graph_break()
        return self.blocks[1](x).sum()


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def a_case(**settings):
    return bitproof.Case(
        name="mine", family="mine", reference="mine.py:plain", candidate="compiled", steps=1,
        parallelism=Parallelism(world_size=2, ep=1), pipeline=Pipeline(**settings),
    )  # fmt: skip


def trained(model):
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    loss = model(torch.randn(3, 4))
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]


def captured(tmp_path, case=None, passes=(), dump=None):
    """A broken model, trained once, and its capture; and the same trained in eager mode."""
    model = Broken()
    options = GraphOptions(extra_passes=passes, dump_dir=dump)
    capture = compile_models(SimpleNamespace(model=model), case or a_case(), options, tmp_path / "work")
    return capture, trained(model), trained(Broken())


def same(left, right):
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def test_compiled_gradients_are_eagers_bits_and_each_piece_is_a_forward_and_a_backward_graph(tmp_path):
    capture, compiled, eager = captured(tmp_path, dump=tmp_path / "graphs")
    assert same(compiled, eager)
    assert [(report.name, report.nodes_before > 0) for report in capture.reports.values()] == [("differentiate", True)]
    folders = {path.name for path in (tmp_path / "graphs").iterdir() if path.is_dir()}
    assert folders == {"000-forward", "001-forward", "002-backward", "003-backward"}
    assert "torch._C._nn.linear" in (tmp_path / "graphs" / "000-captured.txt").read_text()
    again, _, _ = captured(tmp_path)
    assert again.code_hash == capture.code_hash and again.generated_hash is None
    assert capture.num_calls > 10 and not capture.races


def test_nodes_say_their_module_direction_and_line(tmp_path):
    graphs = []
    model = Broken()
    capture = compile_models(SimpleNamespace(model=model), a_case(), GraphOptions(), tmp_path)
    with capture.run_by(lambda module: graphs.append(module) or module.forward, capture.call):
        trained(model)
    found = {origin_of(node)[:2] for module in graphs for node in module.graph.find_nodes(op="call_function",
             target=torch.ops.aten.addmm.default)}  # fmt: skip
    assert found == {Origin("blocks.0.up", "forward")[:2], Origin("blocks.1.up", "forward")[:2]}
    [gelu, _] = [n for m in graphs for n in m.graph.find_nodes(op="call_function",
                 target=torch.ops.aten.gelu_backward.default)]  # fmt: skip
    assert origin_of(gelu)[:2] == ("blocks.1", "backward") and "test_compiled.py:" in origin_of(gelu).source


def test_a_log_leaves_a_model_compiled_also_one_whose_class_is_torchs_own(tmp_path):
    model = nn.Sequential(nn.Linear(4, 5), nn.GELU(), nn.Flatten(0), nn.Linear(15, 1))
    made = SimpleNamespace(model=model)
    capture = compile_models(made, a_case(), GraphOptions(), tmp_path)
    with logged(made, captured=capture) as log:
        trained(model)
    assert len(capture.codes) == 2
    gelus = [(call.node, *call.place[:2]) for call in log.calls if call.operator.startswith("gelu")]
    assert gelus == [("gelu", "1", "forward"), ("gelu_backward", "1", "backward")]


def test_kernels_are_logged_as_one_call_that_is_judged_by_what_the_models_code_asked_for():
    made = SimpleNamespace(model=nn.Linear(1, 1))
    graph = KernelGraph("000-forward", "blocks.1", "forward", ("gelu of blocks.1 (forward)", "erf of ..."), 1)
    with logged(made) as log:
        x = torch.ones(3).neg()
        _, kept = log.kernels_called(graph, lambda inputs: [inputs[0] * 2, inputs[0] * 3], [x])
        kept.sum()
    assert [call.operator for call in log.calls] == ["ones", "neg", "graph 000-forward", "sum"]
    _, neg, kernels, total = log.calls
    assert kernels.place[:2] == ("blocks.1", "forward") and kernels.inputs == neg.outputs
    assert (len(kernels.outputs), kernels.scalars) == (1, (("0", "gelu of blocks.1 (forward)"),))
    assert total.producers == (2,)


def test_a_pass_of_the_users_goes_through_every_graph_and_a_prefix_leaves_it_out(tmp_path):
    file = tmp_path / "passes.py"
    file.write_text(PASSES)
    passes = (f"{file}:nothing", f"{file}:other_gelu")
    capture, compiled, eager = captured(tmp_path, passes=passes)
    assert not same(compiled, eager)
    assert list(capture.reports) == ["differentiate", "nothing", "other_gelu"]
    for until, names in (("nothing", ["differentiate", "nothing"]), ("differentiate", ["differentiate"]), ("", [])):
        torch._dynamo.reset()
        capture, compiled, eager = captured(tmp_path, a_case(until=until), passes)
        assert same(compiled, eager) and list(capture.reports) == names and capture.codes


def test_what_a_pass_raises_is_raised_as_it_is(tmp_path):
    file = tmp_path / "passes.py"
    file.write_text("def wrong(module):\n    return 3\n")
    compile_models(
        SimpleNamespace(model=(model := Broken())), a_case(), GraphOptions(extra_passes=(f"{file}:wrong",)), tmp_path
    )
    with (
        pytest.raises(PassError, match="wrong did not return a graph"),
        refusals_raised(),
    ):
        trained(model)


def test_inductors_operators_may_be_run_one_by_one(tmp_path):
    capture, compiled, _ = captured(tmp_path, a_case(backend="inductor", until="decompose"))
    assert list(capture.reports) == ["differentiate", "decompose"]
    assert "gelu" not in "".join(capture.codes) and compiled


def test_a_system_without_a_model_is_refused(tmp_path):
    with pytest.raises(UsageError, match="shows no model that could be compiled"):
        compile_models(SimpleNamespace(), a_case(), GraphOptions(), tmp_path)


def test_it_is_the_candidate_of_a_reference_of_ones_own_alone():
    check_system("compiled")
    check_case(a_case())
    check_extra_passes(("torch.fx:passes",), a_case())
    assert not CaseFolders(a_case(), None, None).remarks_on_graphs()
    for changes in ({"reference": "eager"}, {"reference": "compiled"}, {"reference": "graph"}):
        with pytest.raises(CaseError, match="asks the system compiled"):
            replace(a_case(), **changes)
    for settings in ({"bucket": True}, {"backend": "regional_inductor"}):
        with pytest.raises(CaseError, match="asks the system compiled"):
            a_case(**settings)


@pytest.mark.ranks
@pytest.mark.usefixtures("one_host")
@pytest.mark.slow
def test_a_pass_that_changes_bits_is_found_with_its_call_and_by_bisection(tmp_path):
    (tmp_path / "passes.py").write_text(PASSES)
    (tmp_path / "mine.py").write_text(TRAINER)
    reference, name = f"{tmp_path / 'mine.py'}:plain", f"{tmp_path / 'passes.py'}:other_gelu"
    case = replace(a_case(), reference=reference)
    run = bitproof.run(case, control="never", report_dir=tmp_path / "plain", dump_graphs=True)
    assert run.verdict == "EQUAL", run.result.error
    assert any("compiled was compiled: 1 graph of" in remark for remark in run.result.remarks), run.result.remarks
    assert [report.name for report in run.result.passes] == ["differentiate"]
    assert sorted(path.name for path in run.folder.rglob("*-captured.txt")) == ["000-captured.txt"]
    found = bitproof.bisect(case, extra_passes=[name], report_dir=tmp_path / "bisected")
    assert found.blamed == "other_gelu", found
    call = found.result.first_divergence.call
    assert (call.operator, call.module, call.direction) == ("gelu", "1", "forward")
    manifest = next(json.loads(path.read_text()) for path in run.folder.rglob("compiled/manifest.json"))
    assert manifest["graph"]["passes"][0]["name"] == "differentiate"


def test_a_compiled_graph_is_of_the_innermost_module_around_all_its_calls():
    graph = torch.fx.Graph()
    node = graph.placeholder("x")
    for module in ("layers.0.attention", "layers.1.attention"):
        node = graph.call_function(torch.ops.aten.relu.default, (node,))
        node.meta[META_KEY] = Origin(module, "forward")
    graph.output((node,))
    described = compiled.kernel_graph_of(torch.fx.GraphModule({}, graph), "000-forward", "forward")
    assert described.module == "layers", "layers.attention is no module"
