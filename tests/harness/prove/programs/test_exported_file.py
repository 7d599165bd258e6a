import io
import json
import zipfile

import pytest
import torch
from torch import nn
from torch.export import Dim, export

from bitproof.harness.commands.prove_files import prove_files
from bitproof.harness.errors import UsageError
from bitproof.harness.prove.programs.exported_file import read_exported
from tests.harness.prove.toy_graphs import randn

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
