"""What `test_document.py` does not see on a page: shades, and what too many tensors leave out."""

from __future__ import annotations

from bitproof.harness.report.html import heatmaps


def test_shades_are_quarters_of_the_share_that_differs():
    shares = (0.001, 0.25, 0.26, 0.5, 0.51, 0.75, 0.76, 1.0, 1.5)
    assert [heatmaps.shade_of(share) for share in shares] == list("112233444")


def test_what_has_nothing_to_differ_asks_for_no_cells(make_result):
    assert heatmaps.wanted_cells(make_result("c")) == 0
    assert heatmaps.by_tensor(make_result("c"), 1000) is None


def test_tensors_beyond_the_room_are_counted(make_result):
    differing = {"grad": {f"layers.{index}": {"0": [0]} for index in range(30)}}
    found = heatmaps.by_tensor(make_result("c", differing=differing), 1)
    assert found is not None
    assert [(kind, len(tensors)) for kind, tensors in found.groups] == [("grad", 10)], "ten are always shown"
    assert found.hidden == 20
