"""Rows that ranks share are whole again once all ranks are summed; anything else done to a share is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from bitproof.harness.errors import ChunkError
from tests.harness.graph.analysis.test_mixing import Function, judge, mixes
from tests.harness.graph.graphs import Applied


class Sharing(nn.Module):
    """Computes one of two runs of the tokens and sums over two ranks what both have computed."""

    def __init__(self, computes: Function, sums: Callable[[Tensor, Tensor], Tensor], at: str = "mine") -> None:
        super().__init__()
        self.computes, self.sums, self.at = computes, sums, at
        self.register_buffer("mine", torch.tensor([0]))
        self.register_buffer("other", torch.tensor([1]))

    def forward(self, x: Tensor) -> Tensor:
        x_TD = x.flatten(0, 1)
        own = x_TD.unflatten(0, (2, -1)).index_select(0, self.get_buffer("mine")).flatten(0, 1)
        y_tD = self.computes(own)
        rest = y_tD.new_zeros(2, *y_tD.shape)
        y_TD = rest.index_copy(0, self.get_buffer(self.at), y_tD.unsqueeze(0)).flatten(0, 1)
        return self.sums(y_TD, x_TD).view(x.shape)


def over_ranks(x: Tensor, how: str = "sum") -> Tensor:
    c10d = torch.ops._c10d_functional
    joined: Tensor = c10d.wait_tensor(c10d.all_reduce(x, how, "tp"))
    return joined


RIGHT = {
    "summed": Sharing(torch.sin, lambda y, x: over_ranks(y)),
    "added to what ranks have whole": Sharing(torch.sin, lambda y, x: over_ranks(y + x)),
}
WRONG = {
    "never summed": Sharing(torch.sin, lambda y, x: y),
    "squared before the sum": Sharing(torch.sin, lambda y, x: over_ranks(y * y)),
    "the largest of ranks": Sharing(torch.sin, lambda y, x: over_ranks(y, "max")),
    "put back as another rank's": Sharing(torch.sin, lambda y, x: over_ranks(y), at="other"),
    "mixed while it is one's own": Sharing(lambda own: own.cumsum(0), lambda y, x: over_ranks(y)),
}


@pytest.mark.parametrize("name", RIGHT)
def test_rows_that_ranks_share_are_whole_again_when_all_ranks_are_summed(name: str) -> None:
    judge(RIGHT[name], "batch")


@pytest.mark.parametrize("name", WRONG)
def test_a_rank_that_does_anything_else_with_its_share_of_the_rows_is_refused(name: str) -> None:
    with pytest.raises(ChunkError):
        judge(WRONG[name], "batch")


class PickingAgain(Sharing):
    """Takes another rank's run, of which it has zeros, out of what it has put back, and sums that."""

    def forward(self, x: Tensor) -> Tensor:
        runs = x.flatten(0, 1).unflatten(0, (2, -1))
        own = runs.index_select(0, self.get_buffer("mine"))
        rest = own.new_zeros(2, *own.shape[1:]).index_copy(0, self.get_buffer("mine"), own)
        return over_ranks(rest.index_select(0, self.get_buffer("other")).flatten(0, 1))


class FillingTheRest(Sharing):
    """Has its own rows in the place of the other rank's."""

    def forward(self, x: Tensor) -> Tensor:
        own = x.flatten(0, 1).unflatten(0, (2, -1)).index_select(0, self.get_buffer("mine"))
        rest = own.new_zeros(2, *own.shape[1:])
        rest.copy_(own.expand(rest.shape))
        y_TD = rest.index_copy(0, self.get_buffer("mine"), own).flatten(0, 1)
        return over_ranks(y_TD).view(x.shape)


@pytest.mark.parametrize("cls", [PickingAgain, FillingTheRest])
def test_a_share_is_one_summand_only_beside_zeros_and_whole(cls: type[Sharing]) -> None:
    with pytest.raises(ChunkError):
        judge(cls(torch.sin, lambda y, x: y), "batch")


c10d = torch.ops._c10d_functional


def gathered(x: Tensor) -> Tensor:
    """What two ranks have of x, in a dim of its own before the others."""
    both: Tensor = c10d.wait_tensor(c10d.all_gather_into_tensor(x, 2, "tp"))
    return both.unflatten(0, (2, -1))


def scattered(x: Tensor, how: str = "sum") -> Tensor:
    own: Tensor = c10d.wait_tensor(c10d.reduce_scatter_tensor(x.flatten(0, 1), how, 2, "tp"))
    return own


WHOLE_ROWS: dict[str, Function] = {
    "parts of other dims gathered and scattered": lambda x: scattered(gathered(x).sin()),
    "a rank's share, added and scattered": lambda x: scattered(torch.stack([x, x.new_zeros(x.shape)])),
}
DIVIDED_ROWS: dict[str, Function] = {
    "rows divided among ranks": lambda x: scattered(x.unflatten(0, (2, -1))).repeat(2, 1, 1),
    "a mean over ranks": lambda x: scattered(gathered(x), "avg"),
    "rows of all ranks in one dim, mixed": lambda x: scattered(gathered(x).flip(0, 1)),
    "rows in another order, gathered": lambda x: gathered(x.flatten()[x.flatten().argsort()])[0].view(x.shape),
}


@pytest.mark.parametrize("name", WHOLE_ROWS)
def test_ranks_that_each_have_all_rows_may_be_gathered_and_scattered(name: str) -> None:
    assert not mixes(WHOLE_ROWS[name], "batch")


@pytest.mark.parametrize("name", DIVIDED_ROWS)
def test_rows_that_a_collective_would_divide_or_rearrange_are_refused(name: str) -> None:
    assert mixes(DIVIDED_ROWS[name], "batch")


def test_a_sequence_that_ranks_divide_is_refused_with_the_module_and_the_collective() -> None:
    with pytest.raises(ChunkError) as error:
        judge(Applied(lambda _, x: gathered(x).transpose(0, 1).flatten(1, 2)), "seq")
    assert str(error.value).splitlines()[0] == (
        "ChunkError: cannot chunk layers.0 along seq: all_gather_into_tensor `all_gather_into_tensor` runs over ranks, "
        "which may divide them"
    )


@pytest.mark.parametrize("dim", [0, 1])
def test_nothing_is_computed_over_the_runs_into_which_rows_are_cut(dim: int) -> None:
    def over_runs(x: Tensor) -> Tensor:
        return x.flatten(0, 1).unflatten(0, (2, -1)).cumsum(dim).flatten(0, 1).view(x.shape)

    assert mixes(over_runs, "batch")


class SharingFolded(Sharing):
    """The same for folded tokens: a rank's run is half of the open dim, and each of its tokens has three rows."""

    def forward(self, x: Tensor) -> Tensor:
        own = x.unflatten(0, (2, -1)).index_select(0, self.get_buffer("mine")).flatten(0, 1)
        rows = own.unsqueeze(1).expand(-1, 3, -1).flatten(0, 1)
        y_tD = self.computes(rows).view(own.shape[0], 3, own.shape[1]).sum(1)
        rest = y_tD.new_zeros(2, *y_tD.shape)
        return over_ranks(rest.index_copy(0, self.get_buffer(self.at), y_tD.unsqueeze(0)).flatten(0, 1))


def test_half_of_the_folded_tokens_are_a_ranks_run_and_are_whole_again_once_summed() -> None:
    judge(SharingFolded(torch.sin, lambda y, x: y), "batch", torch.randn(8, 4))


def pairs_mixed(rows: Tensor) -> Tensor:
    """Each pair of rows gets its mean."""
    means = rows.view(rows.shape[0] // 2, 2, rows.shape[1]).mean(1, keepdim=True)
    return means.expand(-1, 2, -1).reshape(rows.shape)


@pytest.mark.parametrize("mixes", [pairs_mixed, lambda rows: rows.cumsum(0)])
def test_a_rank_that_mixes_its_folded_tokens_is_refused(mixes: Function) -> None:
    with pytest.raises(ChunkError):
        judge(SharingFolded(mixes, lambda y, x: y), "batch", torch.randn(8, 4))
