"""Which part of a tensor a rank holds, and the cells into which two layouts divide it."""

from __future__ import annotations

import pytest

from bitproof.harness.records.layout import Box, alike, joint_cuts, name_cell


def test_a_box_is_read_as_it_is_written():
    for box in (
        Box((8, 4), (((0, 2), (4, 6)), ((1, 4),))),
        Box.whole((3, 5)),
        Box.whole(()),
        Box((4,), (((4, 4),),)),
        Box((3, 5), (((2, 9),),), is_flat=True),
        Box((), (((0, 1),),), is_flat=True),
    ):
        assert Box.parse(str(box)) == box
    assert str(Box((8, 4), (((0, 2), (4, 6)), ((1, 4),)))) == "[0:2+4:6, 1:4] of [8, 4]"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[0:4] of [3]",
        "[0:4] of [4, 4]",
        "[2:1] of [4]",
        "[2:3+0:1] of [4]",
        "[0:2+2:2] of [4]",
        "[0] of [4]",
        "[0:4] of [-4]",
        "[:] of [4]",
        "[0:7] of flat [2, 3]",
        "[0:2, 0:3] of flat [2, 3]",
    ],
)
def test_what_is_no_part_of_a_tensor_is_refused(text):
    with pytest.raises(ValueError):
        Box.parse(text)


def test_rows_in_three_and_columns_in_two_have_six_cells_of_which_each_box_holds_some():
    thirds = [Box((8, 4), (((first, end),), ((0, 4),))) for first, end in ((0, 3), (3, 6), (6, 8))]
    halves = [Box((8, 4), (((0, 8),), ((first, first + 2),))) for first in (0, 2)]
    cuts = joint_cuts([*thirds, *halves])
    assert cuts == ((0, 3, 6, 8), (0, 2, 4))
    assert thirds[1].cells(cuts) == [((3, 6), (0, 2)), ((3, 6), (2, 4))]
    assert len({cell for box in thirds for cell in box.cells(cuts)}) == 6
    assert {cell for box in thirds for cell in box.cells(cuts)} == {cell for box in halves for cell in box.cells(cuts)}
    assert thirds[1].slices(((3, 6), (2, 4))) == (slice(0, 3), slice(2, 4))
    assert name_cell(((3, 6), (2, 4))) == "[3:6, 2:4]"


def test_a_cell_of_an_interleaved_box_lies_behind_the_runs_before_it():
    box = Box((8,), (((0, 2), (4, 6)),))
    assert box.local_shape == (4,)
    assert [box.slices(cell) for cell in box.cells(((0, 2, 4, 5, 6, 8),))] == [
        (slice(0, 2),),
        (slice(2, 3),),
        (slice(3, 4),),
    ]


def test_a_number_has_one_cell_and_an_empty_part_has_none():
    assert Box.whole(()).cells(()) == [()]
    assert Box((4,), (((4, 4),),)).cells(((0, 4),)) == []


def test_rows_and_runs_of_elements_are_cut_as_one_row():
    rows, run = Box((4, 3), (((1, 3),), ((0, 3),))), Box((4, 3), (((5, 12),),), is_flat=True)
    same = alike([rows, run])
    assert [str(box) for box in same] == ["[3:9] of flat [4, 3]", "[5:12] of flat [4, 3]"]
    cuts = joint_cuts(same)
    assert cuts == ((3, 5, 9, 12),) and rows.cut_by(cuts) == same[0]
    assert same[0].cells(cuts) == [((3, 5),), ((5, 9),)] and same[1].cells(cuts) == [((5, 9),), ((9, 12),)]
    assert Box.whole(()).flat == Box((), (((0, 1),),), is_flat=True)


def test_columns_are_no_run_of_elements_and_another_shape_is_another_tensor():
    run = Box((4, 3), (((5, 12),),), is_flat=True)
    assert alike([run, Box((4, 3), (((0, 4),), ((0, 2),)))]) == []
    assert alike([run, Box.whole((3, 4))]) == alike([run, Box.whole((12,))]) == []
    assert run.cut_by(((0, 4), (0, 3))) is None
