"""Checks with all ranks of a machine: form groups, sum in rank order, exchange rows, use two groups at once.

A check passes if it passes on all ranks. On a CPU, gloo replaces NCCL.
"""

from __future__ import annotations

import itertools
import zlib

import torch
from torch import Tensor

from bitproof.harness.capture.digest import digest
from bitproof.harness.powers.doctor.setting import Answer, Setting
from bitproof.harness.torch_compat import build

OPS = torch.ops._c10d_functional

launches: list[str] = []
"""The collectives that this rank has launched, in order: `all_reduce 3 of group first, 24 bytes of float32`."""


def note(rank: int, line: str) -> None:
    if line.startswith("launches "):
        launches.append(line.removeprefix("launches "))


def library(device: torch.device) -> list[int]:
    """Return the version of NCCL as a list of numbers; on a CPU, the version of torch."""
    if device.type == "cuda":
        return [*torch.cuda.nccl.version()]
    return [int(part) for part in build()[0].partition("+")[0].split(".") if part.isdigit()]


def check_joined(setting: Setting, rank: int) -> Answer:
    """Check that all ranks have the same NCCL version, and that each group gathers values from its ranks in order."""
    from torch import distributed

    from bitproof.reference.parallel.collectives import all_gather
    from bitproof.reference.parallel.mesh import FSDP, GROUP_NAMES, ranks_in

    device, wrong = setting.device_of(rank), []
    version = library(device)
    # Through the collectives under test: unequal versions may hang here, and the check then fails by its time limit.
    versions = all_gather(torch.tensor([version], device=device), setting.ranks, FSDP).tolist()
    wrong += [
        f"rank {other} has version {found}, not {version}" for other, found in enumerate(versions) if found != version
    ]
    # Each rank sends its own number, so the result shows the order of the group's ranks.
    for name in GROUP_NAMES:
        wanted = [*(ranks_in(name) or ())]
        found = all_gather(torch.tensor([rank], device=device), len(wanted), name).tolist()
        if found != wanted:
            wrong.append(f"group {name} gathers of ranks {found}, not {wanted}")
    backend = distributed.get_backend()
    if device.type == "cuda" and backend != "nccl":
        wrong.append(f"collectives go through {backend}")
    text = f"{backend}, version {'.'.join(map(str, version))}, {len(GROUP_NAMES)} groups of {setting.ranks} ranks"
    return not wrong, f"{text}, {len(wrong)} wrong{f': {wrong[0]}' if wrong else ''}"


def check_rank_order_sums(setting: Setting, rank: int) -> Answer:
    """Check that bitproof's own sums over ranks add in ascending rank order.

    Tensors of each size are summed twice: separately, and together in a single message.
    """
    return _sums(setting, rank, is_ordered=True)


def check_native_sums(setting: Setting, rank: int) -> Answer:
    """Check that NCCL's own sums over ranks have the same bits when they are repeated.

    The bits must also be the same whether tensors are summed separately or together in a single message.
    """
    return _sums(setting, rank, is_ordered=False)


def _sums(setting: Setting, rank: int, *, is_ordered: bool) -> Answer:
    from bitproof.reference.parallel.collectives import all_gather, reduce_scatter
    from bitproof.reference.parallel.mesh import FSDP
    from bitproof.reference.parallel.rank_order_group import sum_in_rank_order

    device, ranks, wrong, count = setting.device_of(rank), setting.ranks, [], 0
    # Seeded by the rank: with equal terms, every order would give the same sum.
    generator = torch.Generator().manual_seed(rank)
    for dtype, num_bytes in itertools.product((torch.float32, torch.bfloat16), sizes(setting.max_bytes)):
        # Three parts, so that a fused message mixes rows of several tensors, like a bucket.
        rows = max(1, num_bytes // dtype.itemsize // ranks // 3)
        parts = [torch.randn(ranks, rows, generator=generator).to(device, dtype) for _ in range(3)]
        apart = torch.cat([reduce_scatter(part.view(-1), ranks, FSDP) for part in parts])
        fused, again = (reduce_scatter(torch.cat(parts, dim=1).view(-1), ranks, FSDP) for _ in range(2))
        # In the order of _WHY.
        same = [digest(apart) == digest(fused), digest(fused) == digest(again)]
        if is_ordered:
            # Shape (rank that sent, rank that receives, elements): this rank's terms are whole[:, rank].
            whole = all_gather(torch.cat(parts, dim=1).view(1, -1), ranks, FSDP).view(ranks, ranks, -1)
            same.append(digest(sum_in_rank_order(whole[:, rank])) == digest(fused))
        count += 1
        if not all(same):
            reasons = [why for why, is_same in zip(_WHY, same, strict=False) if not is_same]
            wrong.append(f"{str(dtype).removeprefix('torch.')} of {num_bytes >> 10} KiB: {', '.join(reasons)}")
    text = f": {wrong[0]}" if wrong else ""
    return not wrong, f"{count} sizes and dtypes up to {setting.max_bytes >> 10} KiB, {len(wrong)} wrong{text}"


def check_sums_by_parts(setting: Setting, rank: int) -> Answer:
    """Check that an all-reduce in several parts, as done for large tensors, adds in ascending rank order."""
    from bitproof.harness.torch_distributed import group_named
    from bitproof.reference.parallel.collectives import all_gather
    from bitproof.reference.parallel.device_order_group import DeviceOrderGroup
    from bitproof.reference.parallel.mesh import FSDP
    from bitproof.reference.parallel.rank_order_group import sum_in_rank_order

    device, ranks, wrong, count = setting.device_of(rank), setting.ranks, [], 0
    own = group_named(FSDP)
    group = own if isinstance(own, DeviceOrderGroup) else DeviceOrderGroup(own)  # on a CPU own has no parts
    generator = torch.Generator().manual_seed(rank)
    for dtype in (torch.float32, torch.bfloat16):
        # One element; fewer than ranks; a size that is no multiple of the number of ranks; the largest.
        for num in (1, ranks - 1, 1000 * ranks + 1, setting.max_bytes // dtype.itemsize):
            x = torch.randn(num, generator=generator).to(device, dtype)
            # Before the sum under test, which is written into `x`.
            expected = sum_in_rank_order(all_gather(x.view(1, -1), ranks, FSDP).view(ranks, -1))
            group.all_reduce_by_parts(x).wait()
            count += 1
            if digest(x) != digest(expected):
                wrong.append(f"{str(dtype).removeprefix('torch.')} of {num} elements: not in rank order")
    text = f": {wrong[0]}" if wrong else ""
    return not wrong, f"{count} sizes and dtypes up to {setting.max_bytes >> 10} KiB, {len(wrong)} wrong{text}"


_WHY = ("fused is not apart", "not the same twice", "not in rank order")


def sizes(max_bytes: int) -> list[int]:
    """Return message sizes in bytes: 4 KiB, 16 KiB and so on by factors of 4, up to `max_bytes`."""
    return [4096 * 4**i for i in range(16) if 4096 * 4**i <= max_bytes] or [max_bytes]


def check_all_to_all(setting: Setting, rank: int) -> Answer:
    """Check that an all-to-all with uneven and empty parts sends each row to the right rank, in order."""
    from bitproof.reference.parallel.collectives import all_to_all
    from bitproof.reference.parallel.mesh import FSDP

    device, ranks, rounds, wrong = setting.device_of(rank), setting.ranks, 20, 0
    generator = torch.Generator().manual_seed(0)  # same seed on all ranks: each knows the others' rows
    for index in range(rounds):
        # sent[i, j] is the number of elements that rank i sends to rank j: 0, 37, 74 or 111.
        sent = torch.randint(0, 1 if index == 0 else 4, (ranks, ranks), generator=generator) * 37
        rows = [
            torch.cat([torch.full((int(n),), 1000.0 * i + j) for j, n in enumerate(row)]) for i, row in enumerate(sent)
        ]
        # This rank receives the parts in its column of `sent`, and sends the parts in its row.
        received = all_to_all(rows[rank].to(device), sent[:, rank].tolist(), sent[rank].tolist(), FSDP)
        expected = torch.cat([torch.full((int(n),), 1000.0 * i + rank) for i, n in enumerate(sent[:, rank])])
        wrong += digest(received) != digest(expected)
    return wrong == 0, f"{rounds} rounds of uneven parts, all empty in the first, {wrong} with other rows"


ROUNDS_AT_ONCE = 30
FIRST, SECOND = "first", "second"


def check_groups_at_once(setting: Setting, rank: int) -> Answer:
    """Check that two groups of the same ranks can sum at the same time, if all ranks start the sums in the same order.

    The record of launched collectives must also be the same on all ranks.
    """
    from bitproof.reference.parallel.collectives import all_gather
    from bitproof.reference.parallel.mesh import FSDP, ensure_group

    device, ranks, wrong = setting.device_of(rank), setting.ranks, []
    for name in (FIRST, SECOND):
        ensure_group(name, [range(ranks)])
    num, began = setting.max_bytes // 64, len(launches)
    for index in range(ROUNDS_AT_ONCE):
        order = launch_order(index, rank)
        # The two groups send different values, so a result of the wrong group shows.
        sent = {name: torch.full((num,), float(rank + index + 100 * (name == FIRST)), device=device) for name in order}
        begun = {name: OPS.all_reduce(x, "sum", name) for name, x in sent.items()}
        for name in reversed(order):  # wait in reverse order of launch
            # Rank r sends r + c, so the sum is 0 + 1 + ... + (W - 1) + W c.
            total = ranks * (ranks - 1) / 2 + ranks * (index + 100 * (name == FIRST))
            if not torch.equal(OPS.wait_tensor(begun[name]), torch.full((num,), total, device=device)):
                wrong.append(f"round {index}, group {name}: other sums")
    # Ranks exchange checksums of their launches' texts: equal texts in the same order have equal checksums.
    own = launches[began:]
    codes = torch.tensor([zlib.crc32(line.encode()) for line in own], device=device)
    if (unlike := _first_unlike(all_gather(codes.view(1, -1), ranks, FSDP))) is not None:
        place, other = unlike
        wrong.append(f"launch {place} of rank {rank} is {own[place]}, and rank {other} launches something else there")
    text = f"{ROUNDS_AT_ONCE} rounds of two groups at once, {len(own)} launches, {len(wrong)} wrong"
    return not wrong, text + (f": {wrong[0]}" if wrong else "")


def launch_order(index: int, rank: int) -> tuple[str, str]:
    """Return the names of two groups in the order in which round `index` launches their sums; `rank` is not used.

    A test replaces this function to show that different orders on ranks are noticed.
    """
    return (FIRST, SECOND) if index % 3 else (SECOND, FIRST)


def _first_unlike(codes_WN: Tensor) -> tuple[int, int] | None:
    """Return (index of the first launch that differs between ranks, rank that differs from rank 0); None if all agree.

    `codes_WN` has a checksum of each launch: W ranks with N launches each.
    """
    found = (codes_WN != codes_WN[0]).nonzero()
    if not len(found):
        return None
    # Rows of `found` are (rank, launch); the smallest launch number is where the order parted.
    rank, place = found[found[:, 1].argmin()].tolist()
    return place, rank


def check_native_order(setting: Setting, rank: int) -> Answer:
    """Check that NCCL's own sums differ from sums in rank order by rounding only, and count the sums that differ."""
    from bitproof.reference.parallel.collectives import all_gather, reduce_scatter
    from bitproof.reference.parallel.mesh import FSDP
    from bitproof.reference.parallel.rank_order_group import sum_in_rank_order

    device, ranks, lines, wrong = setting.device_of(rank), setting.ranks, [], []
    generator = torch.Generator().manual_seed(rank)
    for dtype in (torch.float32, torch.bfloat16):
        unlike = count = 0
        for num_bytes in sizes(setting.max_bytes):
            parts = torch.randn(ranks, max(1, num_bytes // dtype.itemsize // ranks), generator=generator)
            parts = parts.to(device, dtype)
            native = reduce_scatter(parts.view(-1), ranks, FSDP)
            terms = all_gather(parts.view(1, -1), ranks, FSDP).view(ranks, ranks, -1)[:, rank]
            ours = sum_in_rank_order(terms)
            # To first order, a sum of W terms in any order is off by at most (W - 1) eps / 2 times the sum of their
            # magnitudes (Higham, Accuracy and Stability of Numerical Algorithms, 4.2). So two orders differ by less
            # than this bound.
            bound = ranks * torch.finfo(dtype).eps * terms.double().abs().sum(0)
            far = int(((native.double() - ours.double()).abs() > bound).sum())
            name = str(dtype).removeprefix("torch.")
            wrong += [f"{name} of {num_bytes >> 10} KiB: {far} sums are off by more than rounding"] if far else []
            unlike, count = unlike + int((native != ours).sum()), count + native.numel()
        lines.append(f"{unlike:,} of {count:,} sums in {str(dtype).removeprefix('torch.')}")
    return not wrong, f"other bits than in rank order: {', '.join(lines)}{f'; {wrong[0]}' if wrong else ''}"
