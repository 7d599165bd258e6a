"""The reference in the candidate's layout: what pairs, what differs, what is a gap."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bitproof.harness.capture.boxes import digests_of_cells
from bitproof.harness.capture.digest import digest
from bitproof.harness.capture.recording_files import join_parts, read_recording, write_part
from bitproof.harness.capture.stored import StoredRecording
from bitproof.harness.case import Case, Parallelism
from bitproof.harness.compare import part_layouts
from bitproof.harness.compare.part_layouts import LogicalTensor, have_different_layouts
from bitproof.harness.compare.verdict import compare
from bitproof.harness.powers.two_layouts.reshard import (
    are_gradients_divided_differently,
    are_staged,
    common_cuts,
    differ_only_by_missing_parts,
    replicas,
    resharded,
    tensors_of,
)
from bitproof.harness.records import Key, Manifest, Record, Recording, Verdict
from bitproof.harness.records.layout import Box

WHOLE = torch.arange(48.0).reshape(8, 6)
ROWS = [Box((8, 6), (((2 * rank, 2 * rank + 2),), ((0, 6),))) for rank in range(4)]
GRID = [Box((8, 6), (((4 * i, 4 * i + 4),), ((3 * j, 3 * j + 3),))) for i in range(2) for j in range(2)]
KINDS = ("grad", "param", "optimizer")


def case(ranks: int = 4) -> Case:
    parallelism = Parallelism(world_size=ranks, ep=1)
    return Case(name="mine", family="mine", reference="a:b", candidate="a:c", steps=1, parallelism=parallelism)


def part(box: Box, whole: torch.Tensor) -> torch.Tensor:
    return whole[tuple(slice(*runs[0]) for runs in box.runs)]


def recording(boxes, whole=WHOLE, cuts=None, *, change=lambda rank, kind, x: x, name="w") -> Recording:
    """Each rank's part of one tensor, as a DTensor's; None stands for a plain tensor."""
    rows = {}
    for rank, box in enumerate(boxes):
        one = digest(torch.tensor(1.0))
        has_cells = bool(cuts) and "loss/loss" in cuts
        rows[Key(0, "loss", "loss", rank)] = Record(
            one, "float32", (), (1.0).hex(), None, None, None, one if has_cells else None
        )
        for kind in KINDS:
            x = change(rank, kind, part(box, whole).clone() if box else whole.clone())
            cells = cuts and digests_of_cells(x, box or Box.whole(x.shape), cuts[f"{kind}/{name}"])
            placed = ("by hand", str(box)) if box else (None, None)
            rows[Key(0, kind, name, rank)] = Record(digest(x), "float32", tuple(x.shape), None, None, *placed, cells)
    manifest = {"case": case(len(boxes)).to_dict(), "system": "s", "world_size": len(boxes), "steps": 1}
    return Recording(Manifest.of(manifest), rows)


def judged(here, there, **changes):
    """Two layouts of one tensor, compared."""
    cuts = common_cuts(recording(here), recording(there))
    candidate = recording(there, cuts=cuts, **changes)
    other = resharded(recording(here, cuts=cuts), candidate, cuts)
    return other, compare(other.recording, candidate, case(len(there)))


def stored(folder, made: Recording) -> StoredRecording:
    """As a run stores it, to be read rank by rank."""
    parts = [folder.with_suffix(f".{rank}") for rank in made.ranks]
    for rank, path in enumerate(parts):
        write_part(path, made.records_of(rank).items())
    join_parts(folder, made.manifest, parts)
    found = read_recording(folder)
    assert isinstance(found, StoredRecording) and [*found.ranks] == [*made.ranks]
    return found


@pytest.mark.parametrize("there", [GRID, [None] * 4, [Box.whole((8, 6))] * 4, GRID[:3], ROWS[:2]], ids=str)
@pytest.mark.parametrize("here", [ROWS, GRID[::-1]], ids=str)
@pytest.mark.parametrize("has_defect", [False, True])
def test_of_stored_recordings_no_more_than_a_rank_is_read_at_once_and_the_same_follows(
    tmp_path, here, there, has_defect
):
    def change(rank, kind, x):
        return x + 1 if has_defect and (rank, kind) == (1, "grad") else x

    cuts = common_cuts(recording(here), recording(there)) | {"loss/loss": ()}
    whole = recording(here, cuts=cuts), recording(there, cuts=cuts, change=change)
    sides = [stored(tmp_path / f"{number}", made) for number, made in enumerate(whole)]
    ranks = case(len(there))

    def described(here, there):
        other = resharded(here, there, cuts)
        what = [
            have_different_layouts(ranks, here, there),
            differ_only_by_missing_parts(ranks, here, there),
            other.across,
        ]
        what += [common_cuts(here, there), are_staged(here, there), [*replicas(here)], [*replicas(there)]]
        return [*what, tensors_of(here), other.remarks, other.unusable, compare(other.recording, there, ranks)]

    assert described(*sides) == described(*whole)
    assert not any(side.holds_records for side in sides)
    verdict = compare(resharded(*sides, cuts).recording, sides[1], ranks).verdict
    assert verdict == (Verdict.UNVERIFIED if len(there) < 4 else Verdict.DIFFERENT if has_defect else Verdict.EQUAL)


def test_whether_layouts_are_alike_is_asked_without_making_records(tmp_path, monkeypatch):
    made = recording(ROWS)
    backwards = replace(made, records=dict(reversed(made.records.items())))
    sides = stored(tmp_path / "a", made), stored(tmp_path / "b", backwards)
    without = {key: record for key, record in made.records.items() if (key.kind, key.rank) != ("param", 2)}
    lacking = stored(tmp_path / "c", replace(made, records=without))
    monkeypatch.setattr(part_layouts, "part_layouts_of", pytest.fail)
    assert not have_different_layouts(case(), *sides), "in whatever order ranks recorded"
    monkeypatch.undo()
    assert have_different_layouts(case(), sides[0], lacking)
    assert have_different_layouts(case(), sides[0], stored(tmp_path / "d", recording(GRID)))


@pytest.mark.parametrize("there", [GRID, [None] * 4, [Box.whole((8, 6))] * 4])
@pytest.mark.parametrize("here", [ROWS, GRID[::-1], [None] * 4])
def test_the_same_values_in_two_layouts_are_equal_record_by_record(here, there):
    other, found = judged(here, there)
    assert (found.verdict, sum(found.compared.values())) == (Verdict.EQUAL, 16), found.reason
    assert not other.unusable and not other.remarks


def test_one_rank_is_compared_with_four():
    other, found = judged([None], ROWS)
    assert found.verdict == Verdict.EQUAL and len(other.across) == 4, found.reason


@pytest.mark.parametrize("here", [ROWS, [None] * 4])
def test_one_element_of_one_rank_differs_there_and_nowhere_else(here):
    def change(rank, kind, x):
        if (rank, kind) == (2, "grad"):
            x[0, 0] += 1
        return x

    _, found = judged(here, GRID, change=change)
    assert found.verdict == Verdict.DIFFERENT and found.mismatched["grad"] == 1
    first = found.first_divergence
    assert (first.rank, first.kind, first.name) == (2, "grad", "w")


def test_exchanged_parts_differ_on_both_ranks_though_all_values_are_there():
    _, found = judged([None] * 4, [GRID[1], GRID[0], *GRID[2:]])
    assert found.verdict == Verdict.EQUAL, "each says which part it has"
    swapped = {0: 1, 1: 0}
    _, found = judged([None] * 4, GRID, change=lambda rank, kind, x: part(GRID[swapped.get(rank, rank)], WHOLE).clone())
    assert found.mismatched["param"] == 2


def test_a_replica_that_differs_is_a_difference_whichever_side_has_it():
    def apart(rank, kind, x):
        return x + 1 if (rank, kind) == (3, "param") else x

    _, found = judged(ROWS, [Box.whole((8, 6))] * 4, change=apart)
    assert found.mismatched["param"] == 1 and found.first_divergence.rank == 3
    cuts = common_cuts(recording([None] * 4), recording(ROWS))
    reference = recording([Box.whole((8, 6))] * 4, cuts=cuts, change=apart)
    candidate = recording(ROWS, cuts=cuts)
    other = resharded(reference, candidate, cuts)
    assert compare(other.recording, candidate, case()).verdict == Verdict.DIFFERENT
    assert other.remarks == ("replicas of one tensor differ within the reference: step 0, param w",)
    parted = LogicalTensor(0, "param", "w")
    assert [*replicas(reference)] == [*other.unequal_replicas] == [parted] and not [*replicas(candidate)]


def test_a_part_that_nobody_holds_is_a_gap_on_either_side():
    for here, there, side in ((ROWS, GRID[:3], "candidate"), (ROWS[:3], GRID, "reference")):
        _, found = judged(here, there)
        assert found.verdict == Verdict.UNVERIFIED and f"the {side} lacks" in found.reason


def test_a_tensor_that_one_side_lacks_is_a_gap():
    cuts = common_cuts(recording(ROWS), recording(GRID))
    other_name = recording(GRID, name="v")
    found = compare(resharded(recording(ROWS, cuts=cuts), other_name, cuts).recording, other_name, case())
    assert found.verdict == Verdict.UNVERIFIED


def test_another_shape_or_dtype_is_a_difference_though_local_parts_are_alike():
    taller = [Box((16, 6), (((4 * i, 4 * i + 4),), ((0, 6),))) for i in range(4)]
    whole = torch.zeros(16, 6)
    here = recording([None] * 4, whole=torch.zeros(4, 6))
    there = recording(taller, whole=whole)
    cuts = common_cuts(here, there)
    assert cuts == {}
    assert compare(resharded(here, there, cuts).recording, there, case()).mismatched["grad"] == 4


def test_forged_and_missing_digests_of_cells_are_no_evidence():
    cuts = common_cuts(recording(ROWS), recording(GRID))
    good = recording(GRID, cuts=cuts)
    for cells in (None, "", "0" * 32):
        bad = recording(ROWS, cuts=cuts)
        key = Key(0, "grad", "w", 1)
        bad.records[key] = bad.records[key]._replace(cells=cells)
        other = resharded(bad, good, cuts)
        assert other.unusable == ("the reference has no digests of cells of step 0, grad w on rank 1",)
    unknown = recording(ROWS, cuts=cuts)
    unknown.records[Key(0, "grad", "w", 1)] = unknown.records[Key(0, "grad", "w", 1)]._replace(box=None)
    assert resharded(unknown, good, cuts).unusable[0] == "which parts ranks hold is not known of step 0, grad w"


def test_one_layout_pairs_rank_by_rank_whatever_plain_tensors_hold():
    mine = recording([None] * 4, change=lambda rank, kind, x: x + rank)
    assert not have_different_layouts(case(), mine, mine)
    assert have_different_layouts(case(), recording(ROWS), recording(GRID))
    assert resharded(mine, mine, {}).recording.records == mine.records


def test_stages_have_each_parameter_whole_on_one_rank_alone():
    whole = recording([None])
    moved = replace(whole, records={key._replace(rank=3): record for key, record in whole.records.items()})
    assert are_staged(whole, moved)
    assert not are_staged(whole, recording([None] * 2)), "replicas"
    assert not are_staged(recording([Box.whole((8, 6))])), "a DTensor"
    lacking = replace(whole, records={key: record for key, record in whole.records.items() if key.kind != "param"})
    assert not are_staged(lacking), "without parameters nothing tells"


def test_calls_have_partners_where_ranks_lack_parts_alone_and_in_no_other_two_layouts():
    def without(kind: str, rank: int) -> Recording:
        return replace(
            whole, records={key: x for key, x in whole.records.items() if (key.kind, key.rank) != (kind, rank)}
        )

    whole = recording([None] * 4)
    assert differ_only_by_missing_parts(case(), whole, without("optimizer", 1))
    assert differ_only_by_missing_parts(case(), without("optimizer", 1), without("optimizer", 2))
    assert differ_only_by_missing_parts(case(), whole, without("grad", 1))
    assert not differ_only_by_missing_parts(replace(case(), reference_parallelism=case().parallelism), whole, whole)
    for other in (without("param", 1), recording(ROWS), recording([None] * 2)):
        assert not differ_only_by_missing_parts(case(), whole, other)
    for other in (recording(GRID), whole):
        assert not differ_only_by_missing_parts(case(), recording(ROWS), other)


@pytest.mark.parametrize("kind", ["grad", "optimizer"])
@pytest.mark.parametrize("ranks", [(0, 1, 2, 3), (1,)])
@pytest.mark.parametrize("boxes", [ROWS, GRID, [None] * 4], ids=["rows", "grid", "plain"])
def test_a_tensor_that_ranks_do_not_have_is_a_difference_there_and_no_other_layout(boxes, ranks, kind):
    whole, nothing = recording(boxes), torch.empty(0)
    absent = {Key(0, kind, "w", rank): Record(digest(nothing), "float32", (0,)) for rank in ranks}
    lacking = replace(whole, records=whole.records | absent)
    for here, there in ((whole, lacking), (lacking, whole)):
        assert not have_different_layouts(case(), here, there) and not are_gradients_divided_differently(here, there)
        found = compare(here, there, case())
        assert found.verdict == Verdict.DIFFERENT and not found.is_sharded_otherwise
        assert found.mismatched[kind] == len(ranks) == len(found.layout_mismatches)
        (first, *_), side = found.layout_mismatches, "candidate" if here is whole else "reference"
        assert f"none in the {side}" in first and "sharded otherwise" not in first
    assert not have_different_layouts(case(), lacking, lacking)
    assert compare(lacking, lacking, case()).verdict == Verdict.EQUAL


def test_a_gradient_that_some_ranks_lack_hides_no_parameter_that_lies_otherwise():
    here, there = recording(ROWS), recording(GRID)
    lost = Key(0, "grad", "w", 1)
    there.records[lost] = Record(digest(torch.empty(0)), "float32", (0,))
    assert have_different_layouts(case(), here, there) and are_gradients_divided_differently(here, there)
    assert not differ_only_by_missing_parts(case(), here, there)


def test_an_empty_shard_says_where_it_lies_and_is_a_layout_of_its_own():
    empty = [*ROWS[:3], Box((8, 6), (((8, 8),), ((0, 6),)))]
    assert have_different_layouts(case(), recording(ROWS), recording(empty))


def test_a_gradient_that_a_rank_lacks_regroups_no_sum():
    whole = recording([None] * 4)
    lacking = replace(whole, records={key: x for key, x in whole.records.items() if key[1:] != ("grad", "w", 1)})
    assert (lost := [*whole.records.keys() - lacking.records]) == [Key(0, "grad", "w", 1)], lost
    assert have_different_layouts(case(), whole, lacking) and not are_gradients_divided_differently(whole, lacking)
    assert are_gradients_divided_differently(whole, recording(ROWS))
