"""A training script as a system: how it is run, what is discovered, and where it is left."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

from bitproof.harness.case.case import Script, are_foreign, is_factory, script_of
from bitproof.harness.errors import RecordingError, UsageError
from bitproof.harness.settings import absolute_source
from bitproof.harness.systems.revisions import check_out, checkout_of, resolve
from bitproof.harness.systems.script import WatchedScript, owners_of
from bitproof.harness.systems.user_system import UserSystem

HEAD = """
import sys, torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
"""
ADAM = "optimizer = torch.optim.AdamW(model.parameters())\n"
LOOP = """
def main(num_steps=10, parts=1):
    for _ in range(num_steps):
        for _ in range(parts):
            (model(torch.randn(4, 3)).square().mean() / parts).backward()
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.fixture
def shown(tmp_path, monkeypatch):
    """What a script's text shows: a dictionary a step, by kind and name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "argv", [*sys.argv])

    def run(text, num_steps=2, args=(), world_size=1, rank=0):
        path = tmp_path / "train.py"
        path.write_text(text)
        rows = []
        script = Script("train.py", tuple(args))
        system = WatchedScript(script, path, tmp_path, rank, world_size)
        users = UserSystem(str(script), system, names={}, origin={})

        @contextmanager
        def taking(index):
            rows.append({})
            yield lambda kind, name, tensor: rows[index].__setitem__((kind, name), tensor.detach().clone())

        users.take_steps(num_steps, taking)
        return rows

    return run


def kinds(row):
    return sorted({kind for kind, _ in row})


@pytest.mark.parametrize(
    ("name", "script"),
    [
        ("train.py", Script("train.py")),
        ("a/train.py --lr 3e-4 --device cuda:0", Script("a/train.py", ("--lr", "3e-4", "--device", "cuda:0"))),
        ("'my folder/train.py' --name 'a b'", Script("my folder/train.py", ("--name", "a b"))),
        ("git:HEAD~1:train.py -x", Script("train.py", ("-x",), "HEAD~1")),
        ("train.py:make", None),
        ("package.module:factory", None),
        ("git:HEAD~1", None),
        ("git::train.py", None),
        ("eager", None),
        ("", None),
        ("train.py 'unclosed", None),
    ],
)
def test_a_script_s_name_is_its_command_line(name, script):
    assert script_of(name) == script
    if script is not None:
        assert script_of(str(script)) == script and not is_factory(name) and are_foreign(name, "other.py:make")
        absolute = script_of(absolute_source(name))
        assert absolute is not None and Path(absolute.file).is_absolute() and absolute.args == script.args


def test_a_script_runs_as_main_with_its_own_words_and_modules(shown, tmp_path):
    (tmp_path / "beside.py").write_text("SIZE = 3\n")
    text = "import beside, sys, os\nassert __name__ == '__main__' and sys.modules['__main__'].__file__ == __file__\n"
    text += "assert sys.argv == ['train.py', '--lr', '0.1'], sys.argv\nassert 'RANK' not in os.environ\n"
    rows = shown(text + HEAD + ADAM + LOOP + "\nif __name__ == '__main__': main()\n", args=("--lr", "0.1"))
    assert len(rows) == 2 and kinds(rows[0]) == ["buffer", "grad", "loss", "optimizer", "param"]
    assert ("param", "0.weight") in rows[0] and ("buffer", "1.running_mean@after_optimizer") in rows[0]
    assert list(rows[0]) == list(rows[1]) and sys.modules["__main__"].__dict__.get("beside") is None
    sys.modules.pop("beside")


def test_each_micro_batch_shows_its_own_loss(shown):
    [row] = shown(HEAD + ADAM + LOOP + "main(parts=3)", 1)
    assert [name for kind, name in row if kind == "loss"] == ["loss.0", "loss.1", "loss.2"]


def test_two_optimizers_after_one_backward_make_one_step(shown):
    text = "class Both:\n  def __init__(self, *all): self.all = all\n"
    text += "  def step(self): [each.step() for each in self.all]\n"
    text += "  def zero_grad(self): [each.zero_grad() for each in self.all]\n"
    text += "optimizer = Both(torch.optim.SGD(model[0].parameters(), 0.1), torch.optim.AdamW(model[2].parameters()))\n"
    rows = shown(HEAD + text + LOOP + "main()")
    assert ("optimizer", "0.weight.lr") in rows[0] and ("optimizer", "2.weight.exp_avg") in rows[0]
    assert ("param", "1.weight") in rows[0], "what no optimizer holds is shown, and waited for by nobody"


def test_two_models_in_turn_make_one_step(shown):
    text = """
other = nn.Linear(1, 1)
first, second = torch.optim.SGD(model.parameters(), 0.1), torch.optim.SGD(other.parameters(), 0.1)
while True:
    for optimizer in (second, first):
        optimizer.zero_grad()
        other(model(torch.randn(4, 3))).mean().backward()
        optimizer.step()
"""
    rows = shown(HEAD + text)
    names = [name for kind, name in rows[0] if kind == "param"]
    assert len(rows) == 2 and {"weight", "0.weight"} <= set(names) and len(set(names)) == len(names) == 8


def test_a_parameter_without_a_module_is_shown_by_its_place(shown):
    text = "scale = torch.nn.Parameter(torch.ones(1))\noptimizer = torch.optim.SGD([scale], 0.1)\n"
    text += "while True:\n    (scale ** 2).sum().backward()\n    optimizer.step()\n"
    assert ("param", "optimizer.0.group0.param0") in shown(HEAD + text)[1]


def test_an_optimizer_within_another_is_no_step_by_itself(shown):
    text = """
class Outer(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {})
        self.optim = torch.optim.AdamW(self.param_groups[0]["params"][:2])
    def step(self, closure=None):
        self.optim.step()
optimizer = Outer(model.parameters())
"""
    assert len(shown(HEAD + text + LOOP + "main()")) == 2


@pytest.mark.parametrize(
    ("text", "error", "says"),
    [
        (HEAD, RecordingError, "the script train.py ended, and no torch.optim.Optimizer took a step"),
        (HEAD + ADAM, RecordingError, "the script train.py ended, and no torch.optim.Optimizer took a step"),
        (HEAD + ADAM + LOOP + "main(1)", RecordingError, "the script train.py ended after 1 optimizer steps"),
        (HEAD + ADAM + LOOP + "sys.exit(main(1))", RecordingError, "ended after 1 optimizer steps"),
        (HEAD + "sys.exit(2)", UsageError, r"called sys.exit\(2\) before its last step"),
        ("import os\nos.environ['LOCAL_RANK']", UsageError, "reads LOCAL_RANK, which torchrun sets"),
        ("import no_such_package_here", UsageError, "imports no_such_package_here, which is not installed"),
        (HEAD + "raise ValueError('its own')", ValueError, "its own"),
    ],
)
def test_a_script_that_does_not_train_for_long_enough_is_refused(shown, text, error, says, monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(error, match=says):
        shown(text)


@pytest.mark.parametrize(
    "tail",
    [
        "try:\n    main()\nexcept Exception:\n    main()",
        "try:\n    main()\nfinally:\n    raise ValueError('on the way out')",
        "try:\n    main()\nfinally:\n    sys.exit(3)",
        "import contextlib\nwhile True:\n    with contextlib.suppress(Exception):\n        main()",
        "for _ in range(9):\n    try:\n        main()\n    except:\n        pass",
    ],
)
def test_a_script_is_left_whatever_it_catches(shown, tail):
    assert len(shown(HEAD + ADAM + LOOP + tail)) == 2


def test_a_script_that_never_lets_itself_be_left_is_refused(shown):
    tail = "for _ in range(200):\n    try:\n        main()\n    except:\n        pass"
    with pytest.raises(RecordingError, match="goes on after its last step"):
        shown(HEAD + ADAM + LOOP + tail)


def test_spawned_processes_are_the_ranks(shown):
    text = HEAD + ADAM + LOOP + "import torch.multiprocessing as mp\n"
    text += "def run(rank, words):\n    assert (rank, words) == (1, 'given')\n    main()\n"
    assert len(shown(text + "mp.spawn(run, args=('given',), nprocs=2, join=True)", world_size=2, rank=1)) == 2
    with pytest.raises(UsageError, match="the script spawns 4 processes, and runs on 2 ranks") as refusal:
        shown(text + "mp.spawn(run, ('given',), 4)", world_size=2)
    assert refusal.value.fix == "give --world-size 4"


def test_the_models_are_the_outermostowners_of_in_the_optimizers_order():
    inner = nn.Linear(2, 2)
    outer, other = nn.Sequential(inner, nn.Linear(2, 2)), nn.Linear(2, 2)
    found = owners_of([other.weight, inner.weight, torch.nn.Parameter(torch.ones(1))])
    assert len(found) == 2 and found[0] is other and found[1] is outer


@pytest.fixture
def repository(tmp_path):
    """A repository of two commits, with a file that git ignores and one it does not know."""
    folder = tmp_path / "repo"
    (folder / "src").mkdir(parents=True)
    (folder / "data").mkdir()

    def git(*words):
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", "-C", str(folder), *who, *words], check=True, capture_output=True)

    git("init", "-q")
    (folder / ".gitignore").write_text("data\n")
    (folder / "data/tokens.txt").write_text("tokens")
    (folder / "src/train.py").write_text("first = 1\n")
    git("add", "-A")
    git("commit", "-qm", "one")
    (folder / "src/train.py").write_text("second = 2\n")
    git("commit", "-qam", "two")
    (folder / "src/train.py").write_text("third = 3\n")
    (folder / "notes.txt").write_text("unknown to git")
    return folder


def test_a_revision_is_written_beside_what_git_does_not_have(repository, tmp_path):
    script = resolve(Script(str(repository / "src/train.py"), ("--x",), "HEAD~1"))
    assert len(script.revision) == 12 and script == resolve(script)
    before = subprocess.check_output(["git", "-C", str(repository), "status", "--porcelain"])
    for _ in range(2):
        check_out(str(script), tmp_path / "work")
    checkout = checkout_of(script, tmp_path / "work")
    assert (checkout / "src/train.py").read_text() == "first = 1\n"
    assert (checkout / "data/tokens.txt").read_text() == "tokens" and (checkout / "notes.txt").is_symlink()
    assert subprocess.check_output(["git", "-C", str(repository), "status", "--porcelain"]) == before
    assert os.listdir(tmp_path / "work/revisions") == [checkout.name] or len(os.listdir(checkout.parent)) == 2


@pytest.mark.parametrize(("revision", "file"), [("no-such-branch", "src/train.py"), ("HEAD", "src/other.py")])
def test_a_revision_that_git_does_not_find_is_refused(repository, revision, file):
    with pytest.raises(UsageError, match="git does not find"):
        resolve(Script(str(repository / file), (), revision))


def test_a_file_outside_of_any_repository_has_no_revision(tmp_path):
    with pytest.raises(UsageError, match="is in no repository of git"):
        resolve(Script("/no_such_folder/train.py", (), "HEAD"))


BY_HAND = """
for number in range(10**6 if "--for-ever" in sys.argv else 9):
    try:
        model(torch.randn(4, 3)).square().mean().backward()
    except Exception:
        pass
    with torch.no_grad():
        for p in model.parameters():
            p -= 0.1 * p.grad
    if number > 300:
        break
"""


def test_a_script_that_updates_its_parameters_by_hand_is_refused_long_before_it_ends(shown):
    with pytest.raises(RecordingError) as refusal:
        shown(HEAD + BY_HAND, args=["--for-ever"])
    assert refusal.value.what == "the script train.py ran backward 101 times, and made no torch.optim.Optimizer"
    assert "bitproof.watch(step" in refusal.value.fix
