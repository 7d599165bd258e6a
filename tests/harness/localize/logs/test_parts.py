"""A bucket that is filled by views leads back to what filled it."""

from __future__ import annotations

import torch

from bitproof.harness.capture.digest import digest
from bitproof.harness.localize.logs.call_log import logged
from bitproof.harness.localize.logs.parts import Parts


class Filling:
    """Two gradients are written into views of a bucket, which is read whole; `between` may write to it unseen."""

    def __init__(self, stale: bool = False) -> None:
        self.bucket, self.stale = torch.zeros(5), stale
        self.views = self.bucket[:2], self.bucket[2:]

    def step(self) -> None:
        for number, view in enumerate(self.views):
            torch.mul(torch.ones_like(view), 2.0 + number, out=view)
        if self.stale:
            self.bucket.numpy()[:2] = 9
        self.bucket.sum()


def test_what_reads_a_bucket_whole_follows_from_all_that_filled_it() -> None:
    system = Filling()
    with logged(system) as log:
        system.step()
    *_, total = log.calls
    written = [index for index, call in enumerate(log.calls) if call.operator == "mul.out"]
    assert total.operator == "sum" and total.inputs == (digest(system.bucket),)
    assert total.producers == (written[1], *written)


def test_a_part_that_was_written_to_unseen_leads_nowhere() -> None:
    system = Filling(stale=True)
    with logged(system) as log:
        system.step()
    written = [index for index, call in enumerate(log.calls) if call.operator == "mul.out"]
    assert log.calls[-1].producers == (written[1], written[1])


def test_only_what_lies_inside_of_a_tensor_is_a_part_of_it() -> None:
    whole = torch.arange(6.0)
    parts = Parts(digest)
    parts.leave(1, whole[1:3], digest(whole[1:3]), 7)
    parts.leave(1, whole, digest(whole), 8)
    assert parts.inside(1, whole[:4]) == [7]
    assert parts.inside(1, whole[2:]) == [] and parts.inside(2, whole) == [] and parts.inside(1, whole[::2]) == []


def test_it_does_so_too_where_it_was_read_before_and_the_last_one_alone_is_known_to_have_changed_it() -> None:
    system = Filling()
    with logged(system) as log:
        system.bucket.neg()
        system.step()
    written = [index for index, call in enumerate(log.calls) if call.operator == "mul.out"]
    assert log.calls[-1].producers == (written[1], *written)
