"""A file of two systems of a user's that runs without bitproof: it differs, agrees, or says that a rank failed."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bitproof.builtin_cases.chunking import moe_seq
from bitproof.harness.case import Case, Parallelism
from bitproof.harness.powers.shrink.copied_files import OwnFiles
from bitproof.harness.powers.shrink.standalone.own_systems import alone_text, differing

SYSTEMS = """
import torch
import torch.distributed as dist
from inner.sizes import SIZE

class Named:
    names = {"b": "a"}
    def step(self, index): ...

def plain(case, mesh, addend=0.0):
    def step(index):
        assert (case.options["a"], case.batch.sequences, dist.get_world_size()) == ({"b": 1}, 4, 2)
        x = torch.full((SIZE,), index + mesh.rank) + torch.rand(SIZE) + (addend if mesh.rank else 0.0)
        yield "loss", "loss", x.sum()
        yield "grad", "a", x
    return step

def same():
    other = plain
    def step(index, observe):
        for each in torch.ones(2).split(1):
            observe("grad", f"a{index}", each[0])
    return step

def more(case, mesh):
    return plain(case, mesh, 1.0)

def named():
    return Named()
"""
FILES = {"mine.py": SYSTEMS, "inner/sizes.py": "SIZE = 3\n"}


def file_of(candidate: str, reference: str = "plain") -> str:
    own = OwnFiles(FILES, {name: f"mine.py:{name}" for name in ("plain", "same", "more", "named")}, [])
    case: Case = replace(moe_seq, name="mine", steps=2, parallelism=Parallelism(world_size=2), options={"a": {"b": 1}})
    return alone_text('A """head""".', replace(case, reference=reference, candidate=candidate), own)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("reference", "candidate", "status", "line"),
    [
        ("plain", "more", 1, "rank 1, step 0: grad a: 3 of 3 elements differ"),
        pytest.param("plain", "plain", 0, "reference and candidate agree in every bit", marks=pytest.mark.slow),
        pytest.param("same", "same", 0, "reference and candidate agree in every bit", marks=pytest.mark.slow),
        pytest.param("plain", "same", 1, "rank 0, step 1: grad a1: only one side has it", marks=pytest.mark.slow),
        ("plain", "named", 2, "a rank failed"),
    ],
)
def test_it_runs_both_systems_on_ranks_of_its_own(
    tmp_path: Path, reference: str, candidate: str, status: int, line: str
) -> None:
    file = tmp_path / "alone.py"
    file.write_text(file_of(candidate, reference))
    refuse = "import runpy, sys; sys.modules['bitproof'] = None; runpy.run_path(sys.argv[1], run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", refuse, str(file)], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == status and line in done.stdout, done


def test_what_watch_is_made_of_is_held_where_a_file_asks_for_it() -> None:
    assert "bitproof/harness" not in file_of("more")
    own = OwnFiles({"mine.py": "import bitproof\n"}, {"a": "mine.py:f", "b": "1/p/mine.py:g.h"}, [])
    text = alone_text("", replace(moe_seq, reference="a", candidate="b"), own)
    assert "'bitproof/__init__.py'" in text and "bitproof/harness" not in text
    assert "('.', 'mine', 'f')" in text and "('1', 'p.mine', 'g.h')" in text


def test_a_bit_and_what_one_side_lacks_differ() -> None:
    zero = torch.zeros(2)
    assert differing({"a": zero}, {"a": zero.clone()}) == {}
    assert list(differing({"a": zero, "b": zero}, {"a": -zero, "c": zero})) == ["b", "c", "a"]
