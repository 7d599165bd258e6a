import io
import json
import os
import zipfile

import pytest
import torch
from torch import nn
from torch.export import Dim, export

from bitproof.harness.errors import UsageError
from bitproof.harness.powers.proofs.files_command import prove_files
from bitproof.harness.powers.proofs.prover.graphs.export import RefusedError
from bitproof.harness.powers.proofs.prover.programs.exported_file import read_exported
from bitproof.harness.powers.proofs.prover.programs.subjects import prove_equal
from tests.harness.powers.proofs.toy_graphs import randn

X = randn(4, 6)
ROWS = ({0: Dim("rows", max=64)},)


class Scaled(nn.Module):
    def __init__(self, factor=2.0):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.factor = nn.Linear(6, 6), factor

    def forward(self, x):
        return self.linear(x).relu() * self.factor


@pytest.fixture
def saved(tmp_path):
    def save(name, module, shapes=ROWS):
        torch.export.save(export(module, (X,), dynamic_shapes=shapes), tmp_path / name)
        return tmp_path / name

    return save


def changed(file, part, change):
    """The archive with one file changed, or added, as torch's reader sees it."""
    content = io.BytesIO()
    with zipfile.ZipFile(file) as old, zipfile.ZipFile(content, "w") as new:
        root = old.namelist()[0].split("/")[0]
        names = {f"{root}/{part}", *old.namelist()}
        for name in sorted(names):
            data = old.read(name) if name in old.namelist() else b""
            new.writestr(name, change(data) if name == f"{root}/{part}" else data)
    file.write_bytes(content.getvalue())
    return file


def test_two_files_of_one_module_are_proved_for_all_sizes(saved, capsys):
    files = saved("a.pt2", Scaled()), saved("b.pt2", Scaled(), ({0: Dim("rows", max=32)},))
    assert prove_files(*files, as_json=False) == 0
    assert "for all sizes of dim 0 of input 0: 2 to 32" in capsys.readouterr().out
    assert prove_files(*files, as_json=True) == 0
    assert json.loads(capsys.readouterr().out)["verdict"] == "PROVED"


def test_two_files_of_unlike_modules_are_not(saved, capsys):
    assert prove_files(saved("a.pt2", Scaled()), saved("b.pt2", Scaled(3.0)), as_json=False) == 1
    out = capsys.readouterr().out
    assert "other 2.0" in out and "other 3.0" in out and "seen to differ: 1" in out


@pytest.mark.parametrize("text", ["__import__('os').system('touch RAN')", "s77.__class__", "9**9**9", "Lambda(x, x)"])
def test_an_expression_that_is_no_size_is_refused_and_not_evaluated(saved, tmp_path, text, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def planted(data):
        model = json.loads(data)

        def walk(value):
            if isinstance(value, dict):
                for key, item in value.items():
                    if key == "expr_str":
                        value[key] = text
                    walk(item)
            elif isinstance(value, list):
                for item in value:
                    walk(item)

        walk(model)
        return json.dumps(model).encode()

    file = changed(saved("a.pt2", Scaled()), "models/model.json", planted)
    with pytest.raises(UsageError, match="no sum of products of symbols"):
        read_exported(file)
    assert not (tmp_path / "RAN").exists()


class Planted:
    def __reduce__(self):
        return (exec, ("open('RAN', 'w').close()",))


def test_sample_inputs_that_would_run_something_are_refused(saved, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    content = io.BytesIO()
    torch.save((Planted(),), content)
    file = changed(saved("a.pt2", Scaled()), "data/sample_inputs/model.pt", lambda _: content.getvalue())
    with pytest.raises(UsageError, match="cannot be proved"):
        read_exported(file)
    assert not (tmp_path / "RAN").exists()


@pytest.mark.parametrize(
    "part", ["data/aotinductor/model/wrapper.so", "data/constants/custom_obj_0", "data/weights/model.pt"]
)
def test_compiled_code_objects_and_old_pickles_are_refused_by_name(saved, part):
    file = changed(saved("a.pt2", Scaled()), part, lambda _: b"x")
    with pytest.raises(UsageError, match=part):
        read_exported(file)


def test_a_weight_that_is_a_pickle_is_refused(saved):
    def pickled(data):
        config = json.loads(data)
        next(iter(config["config"].values()))["use_pickle"] = True
        return json.dumps(config).encode()

    file = changed(saved("a.pt2", Scaled()), "data/weights/model_weights_config.json", pickled)
    with pytest.raises(UsageError, match="as a pickle"):
        read_exported(file)


def test_what_is_no_archive_is_refused(tmp_path):
    (tmp_path / "a.pt2").write_bytes(b"nothing")
    with pytest.raises(UsageError, match="cannot be proved"):
        read_exported(tmp_path / "a.pt2")
    with pytest.raises(UsageError, match="No such file"):
        read_exported(tmp_path / "none.pt2")


def model_changed(file, change):
    """The archive with its model's JSON changed in place."""

    def edited(data):
        model = json.loads(data)
        change(model)
        return json.dumps(model).encode()

    return changed(file, "models/model.json", edited)


def first_call(model):
    return model["graph_module"]["graph"]["nodes"][0]


@pytest.mark.parametrize(
    "name", ["b=__import__('os').system('touch RAN')", "x):\n open('RAN', 'w')\ndef f(y", "class", "x y", "", "\x1b[2J"]
)
def test_an_input_whose_name_is_code_is_refused_and_never_becomes_python(saved, tmp_path, name, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = saved("a.pt2", Scaled())
    renamed = changed(file, "models/model.json", lambda data: data.replace(b'"x"', json.dumps(name).encode()))
    with pytest.raises(UsageError, match="expected a plain identifier"):
        read_exported(renamed)
    assert not (tmp_path / "RAN").exists()


@pytest.mark.parametrize("context", [[{"__enum__": True, "fqn": "planted:X", "name": "y"}], "planted"])
def test_a_structure_that_names_a_module_is_text_and_imports_nothing(saved, tmp_path, context, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "planted.py").write_text("open('RAN', 'w').close()\nX = {'y': 'a'}\n")
    dictionary = {"default_factory_module": context, "default_factory_name": "X", "dict_context": ["a"]}

    def plant(model):
        for entry in model["graph_module"]["module_call_graph"]:
            for part in ("in_spec", "out_spec") if entry["signature"] else ():
                spec = json.loads(entry["signature"][part])
                spec[1] |= {"type": "collections.defaultdict", "context": dictionary}
                entry["signature"][part] = json.dumps(spec)

    read_exported(model_changed(saved("a.pt2", Scaled()), plant))
    assert not (tmp_path / "RAN").exists()


def test_outputs_that_are_nested_in_another_way_are_refused(saved, capsys):
    class Swapped(nn.Module):
        def __init__(self, names):
            super().__init__()
            self.names = names

        def forward(self, x):
            return dict(zip(self.names, (x + 1, x * 2), strict=True))

    files = saved("a.pt2", Swapped("ab"), None), saved("b.pt2", Swapped("ba"), None)
    assert prove_files(files[0], files[0], as_json=False) == 0
    assert prove_files(*files, as_json=False) == 3
    assert "the outputs' structure is" in capsys.readouterr().out


@pytest.mark.parametrize(
    "target",
    ["torch.load", "_operator.call", "builtins.eval", "os.system", "torch.ops.load_library", "torch.ops.x.y.z"],
)
def test_a_call_of_anything_but_an_operator_on_tensors_is_refused_by_name(saved, target, capsys):
    file = model_changed(saved("a.pt2", Scaled()), lambda model: first_call(model).update(target=target))
    with pytest.raises(RefusedError, match=target):
        read_exported(file)
    assert prove_files(file, file, as_json=False) == 3 and target in capsys.readouterr().out


def test_an_operator_that_opens_files_is_known_by_name_and_never_called(saved, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    def plant(model):
        text, size = {"as_string": "RAN"}, {"as_int": 6}
        inputs = [("filename", text, 1), ("shared", {"as_bool": True}, 1), ("size", size, 1)]
        call = first_call(model)
        call["target"] = "torch.ops.aten.from_file.default"
        call["inputs"] = [{"name": name, "arg": arg, "kind": kind} for name, arg, kind in inputs]

    file = model_changed(saved("a.pt2", Scaled()), plant)
    assert prove_files(file, file, as_json=False) == 3
    assert "from_file" in capsys.readouterr().out and not (tmp_path / "RAN").exists()


def _as_the_last_call(model):
    nodes = model["graph_module"]["graph"]["nodes"]
    nodes.append(nodes[0])


@pytest.mark.parametrize(
    ("change", "reported"),
    [
        (lambda model: model["graph_module"]["graph"].update(new_part={"x": 1}), "unknown field 'new_part'"),
        (lambda model: model["schema_version"].update(major=9), "schema_version.major is 9: expected 8"),
        (_as_the_last_call, "linear is there twice"),
        (lambda model: first_call(model)["inputs"].reverse(), "the order of aten.linear.default: input, weight, bias"),
        (lambda model: first_call(model)["inputs"].append(first_call(model)["inputs"][0]), "each argument of"),
        (lambda model: first_call(model)["inputs"][0].update(name="x"), "each argument of aten.linear.default once"),
        (lambda model: first_call(model)["outputs"].clear(), "expected 1, as aten.linear.default returns"),
        (lambda model: first_call(model)["outputs"].append({"as_none": True}), "expected 1, as"),
        (lambda model: model["graph_module"]["graph"]["tensor_values"]["x"].update(dtype=True), "expected an integer"),
        (lambda model: model["graph_module"]["graph"]["tensor_values"]["x"].update(dtype=99), "expected one of"),
        (
            lambda model: model["graph_module"]["graph"]["tensor_values"]["p_linear_bias"].update(dtype=6),
            "is stored as",
        ),
        (lambda model: model["range_constraints"].update({"__import__": {"min_val": 0, "max_val": 9}}), "symbol"),
    ],
)
def test_a_model_that_says_another_thing_than_torch_writes_is_refused_by_the_field(saved, change, reported):
    with pytest.raises(UsageError, match=reported):
        read_exported(model_changed(saved("a.pt2", Scaled()), change))


def test_a_field_of_a_newer_torch_that_is_empty_is_passed_over(saved):
    file = model_changed(saved("a.pt2", Scaled()), lambda model: first_call(model).update(new_part=None, other=[]))
    read_exported(file)


@pytest.mark.parametrize("text", [b"[" * 100_000, b'{"a": ' * 100_000, b'{"a": 1, "a": 2}', b"[NaN]", b"\xff", b""])
def test_a_model_that_is_no_json_or_nested_without_end_is_refused(saved, text):
    with pytest.raises(UsageError, match="cannot be proved"):
        read_exported(changed(saved("a.pt2", Scaled()), "models/model.json", lambda _: text))


@pytest.mark.parametrize(
    ("part", "value", "reported"),
    [
        ("sizes", [{"as_int": -6}, {"as_int": 6}], "that no tensor has"),
        ("sizes", [{"as_int": 1 << 62}, {"as_int": 6}], "that no tensor has"),
        ("sizes", [{"as_int": 7}, {"as_int": 6}], "needs 42 elements, and the file has 36"),
        ("sizes", [{"as_expr": {"expr_str": "Integer(6)", "hint": None}}], "one of these fields: as_int"),
        ("strides", [{"as_int": 6}], "that no tensor has"),
        ("strides", [{"as_int": 1 << 40}, {"as_int": 1}], "elements"),
        ("strides", [{"as_int": -6}, {"as_int": 1}], "that no tensor has"),
        ("storage_offset", {"as_int": 1}, "needs 37 elements, and the file has 36"),
        ("storage_offset", {"as_int": -1}, "that no tensor has"),
        ("dtype", 8, "needs 36 elements, and the file has 18"),
        ("dtype", 12, "truth values that are neither 0 nor 1"),
        ("dtype", 4, "expected false, as integers have no gradients"),
        ("device", {"type": "meta", "index": None}, "on the meta device"),
        ("device", {"type": "cpu:0); x=(", "index": None}, "one of cpu"),
    ],
)
def test_a_weight_whose_layout_is_forged_is_refused(saved, part, value, reported):
    def forged(data):
        config = json.loads(data)
        meta = config["config"]["linear.weight"]["tensor_meta"]
        if reported.startswith("needs 36"):
            meta["requires_grad"] = True
        meta[part] = value
        return json.dumps(config).encode()

    with pytest.raises(UsageError, match=reported):
        read_exported(changed(saved("a.pt2", Scaled()), "data/weights/model_weights_config.json", forged))


def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "a.pt2")
    with pytest.raises(UsageError, match="not a regular file"):
        read_exported(tmp_path / "a.pt2")


def test_the_values_and_the_sample_inputs_are_those_that_torch_reads(saved):
    file = saved("a.pt2", Scaled())
    own, torchs = read_exported(file), torch.export.load(file)
    assert own.state_dict.keys() == torchs.state_dict.keys()
    assert all(torch.equal(own.state_dict[name], x) for name, x in torchs.state_dict.items())
    assert torch.equal(own.example_inputs[0], torchs.example_inputs[0][0])
    assert [str(node.target) for node in own.graph_module.graph.nodes if node.op == "call_function"] == [
        str(node.target) for node in torchs.graph_module.graph.nodes if node.op == "call_function"
    ]


class Branching(nn.Module):
    def forward(self, x):
        return torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))


def test_a_nested_graph_is_refused_by_name_from_a_file_and_from_python(saved, capsys):
    file = saved("a.pt2", Branching(), None)
    assert prove_files(file, file, as_json=False) == 3
    assert "higher_order.cond" in capsys.readouterr().out
    program = export(Branching(), (X,))
    found = prove_equal(program, program)
    assert found.verdict == "REFUSED" and "a nested graph" in found.reason


PLAIN = randn(3, 4)
COMPLEX = torch.complex(PLAIN, PLAIN)


@pytest.mark.parametrize(
    "x",
    [
        COMPLEX.conj(),
        COMPLEX.conj().imag,
        PLAIN.to_sparse(),
        torch._neg_view(PLAIN),
    ],
)
def test_an_input_that_is_not_plain_memory_is_refused_by_name(x):
    found = prove_equal(lambda x: x * 2, lambda x: x * 2, x)
    assert found.verdict == "REFUSED" and "input 0 is a Tensor that is not plain memory" in found.reason


def test_what_no_check_foresaw_is_refused_with_the_line_and_not_raised(monkeypatch):
    def fails(*_):
        raise ZeroDivisionError("nobody thought of it")

    monkeypatch.setattr("bitproof.harness.powers.proofs.prover.programs.subjects.convert", fails)
    found = prove_equal(torch.relu, torch.relu, PLAIN)
    assert found.verdict == "REFUSED"
    assert "ZeroDivisionError: nobody thought of it (test_exported_file.py, line" in found.reason
