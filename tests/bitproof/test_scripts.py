"""Training scripts as they are, compared on real ranks."""

from __future__ import annotations

import pytest

import bitproof

pytestmark = [pytest.mark.ranks, pytest.mark.usefixtures("one_host")]

SCRIPT = """
import os, sys, torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
if "WORLD_SIZE" in os.environ:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=float(sys.argv[-1]))
shift = 1.0 if "--shifted" in sys.argv else 0.0
for _ in range(9):
    (model(torch.ones(2, 3)).square().mean() + shift).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_script_equals_itself_and_another_argument_is_found(world_size, tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    given = {"args": ["0.1"], "steps": 2, "world_size": world_size, "control": "never", "report_dir": tmp_path}
    same = bitproof.run(reference=str(path), candidate=str(path), **given)
    assert same.verdict == "EQUAL", same
    assert set(same.frame().kind) >= {"loss", "grad", "param", "optimizer"}
    other = bitproof.run(reference=str(path), candidate=f"{path} --shifted", **given)
    assert other.verdict == "DIFFERENT" and "train.py:13" in str(other), other


CACHING = """
import os, sys, torch
from torch import nn
torch.manual_seed(0)
model = nn.Linear(3, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
cache = os.path.join(os.path.dirname(__file__), "cache.pt")
try:
    x = torch.load(cache)
except Exception:
    x = torch.full((2, 3), 2.0 if "--other" in sys.argv else 1.0)
    torch.save(x, cache)
for _ in range(9):
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_candidate_that_reads_what_the_reference_wrote_is_refused_and_a_file_from_before_is_not(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(CACHING)
    given = {"steps": 2, "control": "never", "report_dir": tmp_path}
    found = bitproof.run(reference=str(path), candidate=f"{path} --other", **given)
    assert found.verdict == "ERROR" and "cache.pt, which an earlier run of this comparison wrote" in str(found), found
    again = bitproof.run(reference=str(path), candidate=str(path), **given)
    assert (again.verdict, again.result.world_size) == ("EQUAL", 1), again


BY_ANOTHER_PROGRAM = """
import subprocess, sys, torch
from torch import nn
torch.manual_seed(0)
model = nn.Linear(3, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
value = "2.0" if "--other" in sys.argv else "1.0"
cache = sys.argv[1]
found = subprocess.run(["cat", cache], capture_output=True, text=True)
if found.returncode:
    open(cache, "w").write(value)
x = torch.full((2, 3), float(found.stdout or value))
for _ in range(9):
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_cache_that_another_program_reads_is_refused_and_in_the_folder_for_output_each_run_makes_its_own(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(BY_ANOTHER_PROGRAM)
    given = {"steps": 2, "control": "never", "report_dir": tmp_path / "reports"}
    cache = tmp_path / "cache.txt"
    found = bitproof.run(reference=f"{path} {cache}", candidate=f"{path} {cache} --other", **given)
    assert found.verdict == "ERROR" and "cache.txt, which an earlier run of this comparison wrote" in str(found), found
    own = bitproof.run(reference=f"{path} {{out}}/a", candidate=f"{path} {{out}}/a --other", **given)
    assert own.verdict == "DIFFERENT" and "full" in str(own), own


def test_arguments_that_a_script_refuses_are_reported_in_its_own_words(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("import argparse\nprint('earlier')\nargparse.ArgumentParser().parse_args()\n")
    found = bitproof.run(
        reference=str(path), candidate=str(path), args=["--no-cuda"], steps=1, world_size=1, report_dir=tmp_path
    )
    assert found.verdict == "ERROR"
    assert "train.py: error: unrecognized arguments: --no-cuda" in found.result.error, found
