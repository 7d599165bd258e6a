"""The kernel without a GPU: run by Triton's interpreter, and compiled for three kinds of GPU. Needs Triton."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bitproof.reference.parallel import device_order_group
from bitproof.reference.parallel.device_order_group import sums_in_one_kernel, sums_of, why_no_kernel
from bitproof.reference.parallel.rank_order_group import sum_in_rank_order

ROOT = Path(__file__).parents[3]
HALVES = {2: torch.int16, 4: torch.int32, 8: torch.int64}

# Triton reads TRITON_INTERPRET when it is imported, so each way of running the kernel has a process of its own.
INTERPRET = """
import json
import torch
from bitproof.reference.parallel.device_order_group import sum_in_one_kernel, sums_in_one_kernel
from tests.reference.parallel.test_rank_order_kernel import bits, parts
found = {name: bits(sum_in_one_kernel(given)) for name, given in parts().items()}
chosen = [sums_in_one_kernel(torch.device("cpu"), dtype) for dtype in (torch.float32, torch.bfloat16)]
print(json.dumps([found, chosen]))
"""
COMPILE = """
import json
import sys
from tests.cuda_lane.kernels import compile_sums
print(json.dumps(compile_sums(int(sys.argv[1]))))
"""


def parts() -> dict[str, torch.Tensor]:
    """Parts of ranks, whose sums depend on their order: of all floats, with zeros of both signs, infinities, NaN,
    numbers between two of 16 bits, the smallest and the largest; contiguous, and with room between them."""
    found = {}
    make = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        info = torch.finfo(dtype)
        special = [0.0, -0.0, float("inf"), float("-inf"), float("nan"), info.tiny, -info.smallest_normal / 2, info.max]
        special += [1.0, 1 + info.eps, info.eps / 2, -info.eps / 2, 3 * info.eps / 2, 2 / info.eps, -2 / info.eps]
        choices = torch.tensor(special, dtype=torch.float64).to(dtype)
        for ranks, num in ((1, 5), (2, 1024), (3, 1), (8, 3001)):
            chosen = choices[torch.randint(len(choices), (ranks, num), generator=make)]
            drawn = torch.randn(ranks, num, generator=make).to(dtype)
            found[f"{dtype} {ranks} {num}"] = torch.where(torch.rand(ranks, num, generator=make) < 0.3, chosen, drawn)
        found[f"{dtype} apart"] = torch.randn(4, 3, 50, generator=make).to(dtype)[:, 1]
    return found


def bits(x: torch.Tensor) -> list[int]:
    """The bits of each element; of float64 NaN, whose bits an addition chooses, none."""
    whole: list[int] = torch.where(x == x, x, torch.nan).view(HALVES[x.dtype.itemsize]).tolist()
    return whole


def run(code: str, *arguments: str, **environment: str) -> str:
    command = [sys.executable, "-W", "ignore", "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.ranks
def test_the_kernel_has_the_bits_of_additions_and_is_chosen_where_it_runs() -> None:
    pytest.importorskip("triton", reason="Triton is an optional dependency")
    found, chosen = json.loads(run(INTERPRET, TRITON_INTERPRET="1"))
    assert found == {name: bits(sum_in_rank_order(given)) for name, given in parts().items()}
    assert len(found) == 20 and chosen == [True, True]


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("capability", ["80", "90", "100"])
def test_the_kernel_compiles_and_adds_as_it_is_written(capability: str) -> None:
    """No subnormal number is flushed to zero, no addition joined with a product, and nothing spilled."""
    pytest.importorskip("triton", reason="Triton is an optional dependency")
    for shared, ptx in json.loads(run(COMPILE, capability)).values():
        assert shared == 0 and not re.search(r"\.ftz|\bfma\.|\bmad\.f|\.local", ptx)


def test_a_kernel_that_gives_other_bits_or_is_not_there_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen() -> bool:
        why_no_kernel.cache_clear()
        found = sums_in_one_kernel(torch.device("cpu"), torch.float32)
        why_no_kernel.cache_clear()
        return found

    def fail(given: torch.Tensor) -> torch.Tensor:
        raise ModuleNotFoundError("No module named 'triton'")

    for kernel, is_right in (
        (sum_in_rank_order, True),
        (lambda given: sum_in_rank_order(given.flip(0)), False),
        (lambda given: given.double().sum(0).to(given.dtype), False),
        (fail, False),
    ):
        monkeypatch.setattr(device_order_group, "sum_in_one_kernel", kernel)
        assert chosen() is is_right


def test_a_sum_is_one_tensor_and_leaves_the_parts_as_they_were() -> None:
    given = torch.arange(12.0).view(3, 4)
    total = sum_in_rank_order(given)
    assert total.tolist() == [12, 15, 18, 21] and given.equal(torch.arange(12.0).view(3, 4))
    assert sum_in_rank_order(given[:1]).data_ptr() != given.data_ptr()


def test_the_manifest_has_how_sums_are_taken_and_why_not_by_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(given: torch.Tensor) -> torch.Tensor:
        raise ModuleNotFoundError("No module named 'triton'\nand more")

    def found(kernel: object) -> str:
        monkeypatch.setattr(device_order_group, "sum_in_one_kernel", kernel)
        why_no_kernel.cache_clear()
        text = sums_of(torch.device("cpu"))
        why_no_kernel.cache_clear()
        return text

    assert found(sum_in_rank_order) == "by one Triton kernel"
    assert found(fail) == "by additions (ModuleNotFoundError: No module named 'triton')"
    assert found(lambda given: fail(given) if given.dtype == torch.bfloat16 else sum_in_rank_order(given)) == (
        "by one Triton kernel in float32, by additions (ModuleNotFoundError: No module named 'triton') in bfloat16"
    )
    assert "by additions (the kernel gives other bits)" in found(lambda given: sum_in_rank_order(given.flip(0)))
