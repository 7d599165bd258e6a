"""The kernel without a GPU: run by Triton's interpreter, and compiled for one. Needs Triton (extra `kernel`)."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bitproof.harness.capture import xxh3
from bitproof.harness.capture.digest import digest
from tests.harness.capture.test_digest import LARGE
from tests.harness.capture.test_xxh3 import as_hex, random_leaves

pytest.importorskip("triton", reason="Triton is an optional dependency")
pytestmark = pytest.mark.ranks
ROOT = Path(__file__).parents[3]

# Triton reads TRITON_INTERPRET when it is imported, so each way of running the kernel has a process of its own.
INTERPRET = """
import json
import triton.language
from bitproof.harness.capture import xxh3
xxh3.tl = triton.language  # the interpreter looks for it beside every function
from bitproof.harness.capture.digest import digest
from bitproof.harness.capture.leaves import leaf_hasher
from bitproof.harness.capture.xxh3_kernel import hash_leaves
from tests.harness.capture.test_digest import OnGpu
from tests.harness.capture.test_xxh3 import as_hex
from tests.harness.capture.test_xxh3_kernel import leaves, tensors
print(json.dumps({
    "leaves": as_hex(hash_leaves(leaves())),
    "digests": [digest(tensor.as_subclass(OnGpu)) for tensor in tensors()],
    "kernel is chosen": leaf_hasher(leaves().device) is hash_leaves,
}))
"""
COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from bitproof.harness.capture.xxh3_kernel import hash_leaf
signature = dict.fromkeys(["words", "table", "digests"], "*i64")
aligned = {(argument,): [["tt.divisibility", 16]] for argument in range(3)}
source = triton.compiler.ASTSource(fn=hash_leaf, signature=signature, constexprs={}, attrs=aligned)
compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 1})
print(compiled.metadata.shared)
print(compiled.asm["ptx"])
"""


def leaves() -> torch.Tensor:
    torch.manual_seed(1)
    return random_leaves(20)


def tensors() -> list[torch.Tensor]:
    octets = torch.arange(LARGE).remainder_(251).to(torch.uint8)
    return [octets, octets[3:], octets.view(torch.bfloat16).view(-1, 4).t()]


def run(code: str, **environment: str) -> str:
    environment = os.environ | environment
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True, env=environment, cwd=ROOT).stdout


@pytest.fixture(scope="module")
def interpreted():
    return json.loads(run(INTERPRET, TRITON_INTERPRET="1"))


def test_the_kernel_gives_the_digests_of_torchs_operators(interpreted):
    assert interpreted["leaves"] == as_hex(xxh3.hash_leaves(leaves()))


def test_digests_are_the_same_when_the_kernel_hashes_leaves(interpreted):
    assert interpreted["digests"] == [digest(tensor) for tensor in tensors()]


def test_the_kernel_is_chosen_where_it_runs(interpreted):
    assert interpreted["kernel is chosen"]


def test_the_kernel_compiles_for_hopper_into_wide_loads_and_stays_in_registers():
    shared, _, ptx = run(COMPILE).partition("\n")
    loads = re.findall(r"ld\.global\.(?:\w+\.)*v(\d)\.[bu](\d+)", ptx)
    assert shared == "0"
    assert loads and {int(count) * int(bits) for count, bits in loads} == {128}
    assert "bar.sync" not in ptx and "ld.local" not in ptx
