"""What layouts, memory, groups, random draws and sizes from data mean for a term: accepted, then its neighbour."""

import pytest
import torch
import torch.distributed as dist

from bitproof.harness.graph import offload_operators  # noqa: F401
from bitproof.harness.powers.proofs.prover.evaluate import same_bits
from bitproof.harness.powers.proofs.prover.graphs.export import RefusedError
from tests.harness.powers.proofs.toy_graphs import aten, c10d, compare, randn, verdict, verdicts

W, X = randn(4, 6), randn(6, 5)
S = randn(4, 6) * 3
ONE, OTHER, REFUSED = "PROVED", "NOT PROVED", "REFUSED"


def reasons(reference, candidate, *inputs, **options):
    return [answer.reason for answer in compare(reference, candidate, *inputs, **options).answers]


def in_columns(x):
    """The same values, laid out column by column."""
    return x.t().clone(memory_format=torch.contiguous_format).t()


def test_a_layout_counts_for_a_product_and_not_for_a_sum():
    assert verdict(lambda w, x: w + x, lambda w, x: in_columns(w) + x, W, S) == ONE
    assert verdict(lambda w, x: w @ x, lambda w, x: w.clone() @ x, W, X) == ONE
    assert verdict(lambda w, x: w @ x, lambda w, x: in_columns(w) @ x, W, X) == OTHER


I = torch.tensor([[2, 0, 1], [1, 1, 3]])  # noqa: E741


@pytest.mark.parametrize(
    "carried",
    [
        lambda w, i: w.flip(0),
        lambda w, i: w.roll(2, 1),
        lambda w, i: w.index_select(1, i[0]),
        lambda w, i: w.gather(0, i),
        lambda w, i: w[i],
        lambda w, i: aten.embedding.default(w, i),
        lambda w, i: w.tril(),
        lambda w, i: w.triu(1),
        lambda w, i: w.repeat(2, 3),
        lambda w, i: torch.nn.functional.pad(w, (1, 0, 2, 3), value=0.5),
    ],
)
def test_what_only_carries_elements_may_read_them_anyhow(carried):
    assert verdict(lambda w, x, i: carried(w * x, i), lambda w, x, i: carried(in_columns(w * x), i), W, S, I) == ONE
    assert verdict(lambda w, x, i: carried(w * x, i), lambda w, x, i: carried(w * x + x, i), W, S, I) == OTHER
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        w = torch.tensor([[-0.0, float("inf"), 2.0**-140], [1.5, -3.0, 0.1]], dtype=dtype).repeat(2, 2)
        ways = (w, in_columns(w), torch.stack([w, w], -1)[..., 0], torch.stack([w, w])[1])
        assert all(same_bits(carried(way, I), carried(w, I)) for way in ways)


def test_what_adds_along_a_dim_reads_a_layout():
    for op in (torch.cumsum, torch.softmax, torch.sum):
        assert verdict(lambda w, x: op(w * x, 1), lambda w, x: op(in_columns(w * x), 1), W, S) == OTHER


def test_what_is_filled_or_padded_holds_a_number_whatever_made_it():
    pad = torch.nn.functional.pad
    half = lambda x: torch.full_like(x, 0.5)  # noqa: E731
    assert verdict(lambda w, x: w * x * half(x), lambda w, x: w * x * 0.5, W, S) == ONE
    assert verdict(lambda w, x: (w * x).new_ones(4, 6) * x * w, lambda w, x: w * x, W, S) == ONE
    assert verdict(lambda w, x: (w * x).clone().fill_(0.5) * x * w, lambda w, x: w * (x / 4), W, S) == OTHER
    assert verdict(lambda w, x: (w * x) * w.clone().fill_(0.5), lambda w, x: (w * x) / 2, W, S) == ONE
    assert verdict(lambda w, x: pad(w * x, (1, 2, 3, 4), value=7.0)[3:-4, 1:-2], lambda w, x: w * x, W, S) == ONE
    assert verdict(lambda w, x: pad(w * x, (1, 2, 3, 4))[3:-4, 2:-1], lambda w, x: w * x, W, S) == OTHER
    joined = lambda w, x: torch.cat([torch.zeros(2, 6), w * x])  # noqa: E731
    assert verdict(lambda w, x: pad(w * x, (0, 0, 2, 0)), joined, W, S) == ONE
    assert verdict(lambda w, x: pad(w * x, (0, 0, 2, 0), value=-0.0), joined, W, S) == OTHER
    assert verdict(lambda w, x: pad(w * x, (0, 0, -1, 0)), lambda w, x: (w * x)[1:], W, S) == OTHER


def test_what_is_filled_and_whose_size_depends_on_data_is_reported_by_that_size():
    rows = lambda x: x[:, 0].nonzero()[:, 0]  # noqa: E731
    zeros = lambda n, w, x: torch.cat([w * x, w.new_zeros(n, 6)])  # noqa: E731
    own = lambda w, x: zeros(rows(x).shape[0], w, x)  # noqa: E731
    assert verdict(own, own, W, S) == ONE
    assert verdict(own, lambda w, x: zeros(rows(w).shape[0], w, x), W, S) == OTHER


def test_a_number_is_written_in_place_as_it_is_added():
    def step(update):
        def run(w, x):
            y = w * x
            update(y)
            return y

        return run

    assert verdict(step(lambda y: y.mul_(2.0)), lambda w, x: w * x + w * x, W, S) == ONE
    assert verdict(step(lambda y: y.add_(0.1)), lambda w, x: w * x + 0.1, W, S) == ONE
    assert verdict(step(lambda y: y.sub_(0.1)), lambda w, x: w * x + 0.1, W, S) == OTHER
    assert verdict(step(lambda y: y.add_(0.1)), lambda w, x: w * x + 0.1, W.half(), S.half()) == OTHER
    assert verdict(step(lambda y: y.add_(1.0, alpha=2)), lambda w, x: w * x + 2.0, W, S) == OTHER
    assert verdict(step(lambda y: y[0].zero_()), lambda w, x: w * x, W, S) == REFUSED


def test_where_a_tensor_begins_counts_within_a_line_of_memory():
    aligned = randn(4, 64)
    assert verdict(lambda w, x: w[1:2] @ x, lambda w, x: w[1:2].clone() @ x, aligned, randn(64, 5)) == ONE
    assert verdict(lambda w, x: w[1:] @ x, lambda w, x: w[1:].clone() @ x, aligned, randn(64, 5)) == ONE
    assert verdict(lambda w, x: w[1:] @ x, lambda w, x: w[1:].clone() @ x, W, X) == OTHER


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (lambda w, x: w + x, lambda w, x: torch.add(w, x, alpha=2)),
        (lambda w, x: w - x, lambda w, x: torch.sub(w, x, alpha=-1)),
        (lambda w, x: (w + x) + 1, lambda w, x: (w + x) + 1.1),
        (lambda w, x: (w + x) * 3, lambda w, x: (w + x) + (w + x) + (w + x)),
        (lambda w, x: torch.div(w, x), lambda w, x: torch.div(w, x, rounding_mode="floor")),
        (lambda w, x: w * x, lambda w, x: (w.bfloat16() * x.bfloat16()).float()),
        (lambda w, x: w * x, lambda w, x: (w.double() * x.double()).float()),
        (lambda w, x: w[1:3] * x[1:3], lambda w, x: w[1:3] * x[0:2]),
        (lambda w, x: torch.where(w > x, w, x), lambda w, x: torch.where(x < w, w, x)),
        (lambda w, x: torch.where(w > x, w, x), lambda w, x: torch.where(w > x, x, w)),
        (lambda w, x: (w * x).sum((0, 1)), lambda w, x: (w * x).sum(0).sum(0)),
        (lambda w, x: -(w * x), lambda w, x: w * x),
        (lambda w, x: (w * x).sort().values, lambda w, x: (w * x).sort(stable=True).values),
        (lambda w, x: w * x, lambda w, x: w * w * x),
        (lambda w, x: w * x + x, lambda w, x: torch.addcmul(x, w, x)),
    ],
)
def test_what_only_looks_alike_is_not_proved(one, two):
    assert verdict(one, one, W, S) == ONE
    assert verdict(two, two, W, S) == ONE
    assert verdict(one, two, W, S) == OTHER


def test_whole_numbers_are_added_where_they_stand_and_what_they_are_divided_by_is_opaque():
    a, b = torch.ones(3, dtype=torch.int64), torch.ones(3, dtype=torch.int64)
    assert verdict(lambda w, x: (w + x)[:2], lambda w, x: w[:2] + x[:2], a, b) == ONE
    assert verdict(lambda w, x: (w // x)[:2], lambda w, x: w[:2] // x[:2], a, b) == OTHER
    assert verdict(lambda w, x: (w + x).float()[:2], lambda w, x: (w + x)[:2].float(), a, b) == OTHER
    small = a.to(torch.int16)
    assert verdict(lambda w, x: (w + x)[:2], lambda w, x: w[:2] + x[:2], small, small) == OTHER


def test_swapped_outputs_are_not_proved():
    assert verdicts(lambda w, x: (w * x, w + x), lambda w, x: (w + x, w * x), W, S) == [OTHER, OTHER]


def test_an_output_that_reads_no_parameter_or_no_input_is_refused():
    same = lambda w, x: (w + x, w * 2, x * 2, torch.zeros(3))  # noqa: E731
    assert verdicts(same, same, W, S) == [ONE, REFUSED, REFUSED, REFUSED]
    assert reasons(same, same, W, S)[1:3] == [
        "it reads no input of the step, so it shows nothing",
        "it reads no parameter of the step, so it shows nothing",
    ]


# -- memory -------------------------------------------------------------------------------------------


def test_what_is_written_in_place_is_what_later_readers_see():
    def written(w, x):
        y = w * x
        y.add_(x)
        return y.view(-1) * 1.5

    def unwritten(w, x):
        y = w * x
        y.add_(x)
        return (w * x).view(-1) * 1.5

    assert verdict(written, written, W, S) == ONE
    assert verdict(written, unwritten, W, S) == OTHER


def test_the_order_of_writes_counts():
    def of(*steps):
        def step(w, x):
            y = w * x
            for name in steps:
                getattr(y, name)(x)
            return y

        return step

    assert verdict(of("add_", "mul_"), of("add_", "mul_"), W, S) == ONE
    assert verdict(of("add_", "mul_"), of("mul_", "add_"), W, S) == OTHER
    assert (
        verdict(
            of("add_", "mul_"),
            of(
                "add_",
            ),
            W,
            S,
        )
        == OTHER
    )


def test_an_alias_that_was_overwritten_in_part_is_refused():
    def stale(w, x):
        y = w * x
        y[0].add_(x[0])
        return y * 1.5

    assert verdict(stale, stale, W, S) == REFUSED
    [reason] = reasons(stale, stale, W, S)
    assert "is read after `add_` wrote a part of its memory" in reason


def test_an_alias_of_exactly_what_was_written_is_not_stale():
    def step(w, x):
        y = w * x
        z = y.view(4, 6)
        z.add_(x)
        return y + z

    assert verdict(step, step, W, S) == ONE
    assert verdict(step, lambda w, x: (w * x) + (w * x).add_(x), W, S) == OTHER


def test_a_parameter_that_is_written_through_a_view_is_an_output_that_is_refused():
    def writes(w, x):
        w[:2].add_(x[:2])
        return x * 1.5 + x

    def reads(w, x):
        return x * 1.5 + x

    answers = compare(writes, reads, W, S).answers
    assert [(answer.output, answer.verdict) for answer in answers][1] == ("written parameter 0", REFUSED)


def test_a_buffer_that_only_one_side_writes_is_not_proved():
    def writes(w, x):
        w.add_(x)
        return w * x

    assert verdicts(writes, writes, W, S) == [ONE, ONE]
    assert verdicts(writes, lambda w, x: (w + x) * x, W, S)[1] == OTHER


def test_a_write_to_memory_that_overlaps_itself_is_refused_with_all_that_reads_it():
    def step(w, x):
        y = (w * x)[0]
        aten.add_.Tensor(y.expand(1, 6)[0], x[0])
        return y + x[0]

    def overlapping(w, x):
        y = (w * x)[0, :1]
        torch.ops.aten.fill_.Scalar(y.expand(6), 2.0)
        return y + x[0, :1]

    assert verdict(step, step, W, S) == ONE
    assert verdict(overlapping, overlapping, W, S) == REFUSED


def test_a_write_that_is_not_understood_spoils_what_it_writes():
    def step(w, x):
        y = w * x
        torch.ops.aten.add.out(w, x, out=y)
        return y * x

    with pytest.raises(RefusedError):
        verdict(step, step, W, S)


def test_memory_that_nobody_wrote_equals_nothing():
    step = lambda w, x: torch.empty(4, 6).add_(w) + x  # noqa: E731
    assert verdict(step, step, W, S) == OTHER


def test_a_sum_that_is_copied_back_is_the_sum_in_place():
    counts = torch.arange(6)

    def of(step):
        def run(w, x, counts):
            step(w, x, counts)
            return (w + x) * 1.5

        return run

    in_place = of(lambda w, x, counts: w.add_(x))
    back = of(lambda w, x, counts: w.copy_(x + w))
    assert verdict(in_place, back, W, S, counts) == ONE
    assert verdict(in_place, of(lambda w, x, counts: w.copy_(x + w + x)), W, S, counts) == OTHER
    assert verdict(in_place, of(lambda w, x, counts: w[:2].copy_((x + w)[:2])), W, S, counts) == REFUSED
    assert verdict(in_place, of(lambda w, x, counts: w.sub_(x)), W, S, counts) == OTHER


def test_counts_that_are_added_to_a_buffer_of_real_numbers_may_be_copied_back():
    """Each is converted and rounded once. With a factor it is rounded twice, or once: kernels differ in that."""
    counts = torch.arange(6)
    step = lambda change: lambda w, x: (change(w, x), w * x.float())[1:]  # noqa: E731
    assert verdict(step(lambda w, x: w.add_(x)), step(lambda w, x: w.copy_(w + x)), W, counts) == ONE
    twice = step(lambda w, x: w.add_(x, alpha=2)), step(lambda w, x: w.copy_(torch.add(w, x, alpha=2)))
    assert verdict(*twice, W, counts) == OTHER
    narrow = W.bfloat16()
    wide = step(lambda w, x: w.add_(x.float())), step(lambda w, x: w.copy_(w + x.float()))
    assert verdict(wide[0], wide[0], narrow, counts) == ONE
    assert verdict(*wide, narrow, counts) == OTHER, "the sum in place is rounded to bfloat16 in the kernel, or later"


def test_a_tensor_that_changes_its_shape_in_place_is_refused():
    def step(w, x):
        y = w * x
        y.t_()
        return y + x.t()

    with pytest.raises(RefusedError):
        verdict(step, step, W, S)


def test_reading_memory_itself_is_refused():
    inside = lambda w, x: (w * x).as_strided((2, 6), (6, 1), 3) + x[:2]  # noqa: E731
    before = lambda w, x: (w * x)[1:].as_strided((2, 6), (6, 1), 3) + x[:2]  # noqa: E731
    bits = lambda w, x: (w * x).view(torch.int32) + x.view(torch.int32)  # noqa: E731
    assert verdict(inside, inside, W, S) == ONE
    assert verdict(before, before, W, S) == REFUSED
    assert verdict(bits, bits, W, S) == REFUSED


# -- collectives --------------------------------------------------------------------------------------


def launched(x, group="pairs"):
    return c10d.all_reduce(x, "sum", group)


def test_a_group_of_the_same_ranks_in_the_same_order_is_the_same_group():
    def summed(group):
        return lambda w, x: c10d.wait_tensor(launched(w * x, group))

    assert verdict(summed("pairs"), summed("renamed"), W, S) == ONE
    assert verdict(summed("pairs"), summed("reversed"), W, S) == OTHER
    assert verdict(summed("pairs"), summed("all"), W, S) == OTHER


@pytest.mark.parametrize("op", ["all_gather_into_tensor", "reduce_scatter_tensor"])
def test_ranks_in_another_order_give_others_rows(op):
    def run(group):
        args = (2, group) if op.startswith("all") else ("sum", 2, group)
        return lambda w, x: c10d.wait_tensor(getattr(c10d, op)(w * x, *args))

    assert verdict(run("pairs"), run("renamed"), W, S) == ONE
    assert verdict(run("pairs"), run("reversed"), W, S) == OTHER


def test_sums_and_averages_differ():
    def run(operation):
        return lambda w, x: c10d.wait_tensor(c10d.reduce_scatter_tensor(w * x, operation, 2, "pairs"))

    assert verdict(run("avg"), run("avg"), W, S) == ONE
    assert verdict(run("sum"), run("avg"), W, S) == OTHER


def test_a_collective_in_a_group_that_nobody_knows_is_refused():
    step = lambda w, x: c10d.wait_tensor(launched(w * x, "nowhere"))  # noqa: E731
    assert verdict(step, step, W, S) == REFUSED


def test_a_collective_of_another_size_than_its_group_is_refused():
    step = lambda w, x: c10d.wait_tensor(c10d.all_gather_into_tensor(w * x, 4, "pairs"))  # noqa: E731
    assert verdict(step, step, W, S) == REFUSED


def test_a_collective_that_is_not_waited_for_is_refused():
    early = lambda w, x: launched(w * x) + x  # noqa: E731
    assert verdict(early, early, W, S) == REFUSED
    text = "it reads what `all_reduce` brings, before anything waits for it"
    assert text in reasons(early, early, W, S)[0]


def test_what_is_in_flight_may_be_read_and_not_written():
    def step(write, is_read=True):
        def run(w, x):
            y = w * x
            launch = launched(y)
            z = y.add_(x) if write else y + x
            return c10d.wait_tensor(launch) + (z if is_read else w)

        return run

    assert verdict(step(False), step(False), W, S) == ONE
    assert verdict(step(True), step(True), W, S) == REFUSED
    assert verdict(step(False, is_read=False), step(False, is_read=False), W, S) == ONE
    assert verdict(step(False, is_read=False), step(True, is_read=False), W, S) == REFUSED


def test_the_result_of_what_is_in_flight_may_not_be_written_either():
    def step(write):
        def run(w, x):
            launch = launched(w * x)
            if write:
                launch.neg_()
            return c10d.wait_tensor(launch) * 1.5

        return run

    assert verdict(step(False), step(False), W, S) == ONE
    assert verdict(step(True), step(True), W, S) == REFUSED


GATHER = lambda x: c10d.all_gather_into_tensor(x, 2, "pairs")  # noqa: E731
SCATTER = lambda x: c10d.reduce_scatter_tensor(x, "sum", 2, "pairs")  # noqa: E731


@pytest.mark.parametrize("collective", [GATHER, SCATTER])
def test_what_is_gathered_or_reduced_counts_by_its_elements_however_it_lies(collective):
    def step(lie):
        return lambda w, x: c10d.wait_tensor(collective(lie(w * x))) * 1.5

    as_it_is = step(lambda y: y)
    for lie in (in_columns, lambda y: torch.stack([y, y], -1)[..., 0]):
        assert verdict(as_it_is, step(lie), W, S) == ONE
    assert verdict(step(lambda y: y.t()), step(lambda y: y.t().contiguous()), W, S) == ONE
    for other in (lambda y: y.t().reshape(y.shape), lambda y: y.flip(0)):
        assert verdict(as_it_is, step(other), W, S) == OTHER


class Watching(dist.ProcessGroup):
    """A process group of one rank that keeps the strides of what it is handed."""

    def __init__(self):
        super().__init__(0, 1)
        self.strides = []

    def allgather_into_tensor_coalesced(self, outputs, inputs, options=None):
        self.strides += [x.stride() for x in inputs]
        raise ConnectionError("watched")

    reduce_scatter_tensor_coalesced = allgather_into_tensor_coalesced


@pytest.mark.parametrize(
    "collective",
    [
        lambda x: c10d.all_gather_into_tensor(x, 1, "watched"),
        lambda x: c10d.reduce_scatter_tensor(x, "sum", 1, "watched"),
    ],
)
def test_torch_hands_a_process_group_the_elements_in_row_major_order_or_refuses(collective):
    """Where a group got strides of its own choice, it might send memory as it lies: the rule above rests on this."""
    group = Watching()
    dist.distributed_c10d._register_process_group("watched", group)
    try:
        columns = torch.arange(24.0).view(4, 6).t()
        channels = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
        for x in (columns, channels, torch.stack([columns, columns], -1)[..., 0]):
            with pytest.raises((ConnectionError, RuntimeError), match=r"watched|contiguous"):
                collective(x)
    finally:
        dist.distributed_c10d._unregister_process_group("watched")
    assert group.strides in ([], [(4, 1), (60, 20, 5, 1), (4, 1)])


def test_rows_whose_number_depends_on_data_come_back_from_the_host_as_they_went():
    bitproof = torch.ops.bitproof
    rows = lambda w, x: w.index_select(0, x.nonzero().view(-1))  # noqa: E731

    def moved(w, x):
        shown = rows(w, x)
        host = bitproof.wait_offload(bitproof.offload(shown), shown)
        return bitproof.wait_reload(bitproof.reload(host, "cpu")).sum(0)

    count = torch.ones(4, dtype=torch.int64)
    assert verdict(lambda w, x: rows(w, x).sum(0), moved, W, count) == ONE
    assert verdict(lambda w, x: rows(w, x).sum(0), lambda w, x: moved(w, 1 - x), W, count) == OTHER


def copied(wait_offload=True, keep=True, wait_reload=True, write=None):
    """A product that goes to host memory and back, with something left out or written."""
    bitproof = torch.ops.bitproof

    def run(w, x):
        y = w * x
        host = bitproof.offload(y)
        if write == "source":
            y.view(-1).add_(1)
        if wait_offload:
            host = bitproof.wait_offload(host, y if keep else w)
        back = bitproof.reload(host, "cpu")
        if write == "arrival":
            back.add_(1)
        return (bitproof.wait_reload(back) if wait_reload else c10d.wait_tensor(back)).view(-1) * 1.5

    return run


def test_a_copy_is_followed_as_a_collective_is():
    late = "before anything waits for it"
    right = copied()
    assert verdict(right, right, W, S) == ONE
    for wrong, reported in (
        (copied(wait_offload=False), f"it reads what `offload` brings, {late}"),
        (copied(wait_reload=False), f"it reads what `reload` brings, {late}"),  # a wait of another kind ends nothing
        (copied(write="source"), "`offload` is read after `add_` wrote a part of its memory"),
        (copied(write="arrival"), f"it reads what `reload` brings, {late}"),
        (copied(keep=False), "it waits for `offload`, which copies what is not kept until then"),
    ):
        assert verdict(right, wrong, W, S) == REFUSED
        assert reported in reasons(right, wrong, W, S)[0]


@pytest.mark.parametrize("op", ["all_reduce_", "broadcast"])
def test_any_other_collective_is_refused_in_place_too(op):
    """One in place hands back what it has only begun to write."""
    step = lambda w, x: c10d.wait_tensor(getattr(c10d, op)(w * x, *args)) * x  # noqa: E731
    args = ("sum", "pairs") if op == "all_reduce_" else (0, "pairs")
    assert verdict(step, step, W, S) == REFUSED
    assert f"collective _c10d_functional.{op}.default is not understood" in str(reasons(step, step, W, S)[0])


def test_memory_that_is_handed_on_without_a_word_is_not_understood():
    """Neither its schema nor fake values tell that a lifted tensor lies where the other does."""

    def step(target, write):
        def run(w, x):
            y = w * x
            z = target(y)
            if write:
                z.neg_()
            return y * 1.5 + z

        return run

    fresh = step(aten.lift_fresh.default, True)
    assert verdict(fresh, fresh, W, S) == ONE
    assert verdict(step(aten.lift_fresh.default, False), fresh, W, S) == OTHER
    assert verdict(step(aten.lift.default, False), step(aten.lift.default, True), W, S) == REFUSED


def test_what_reads_memory_in_its_own_order_is_refused_where_a_size_depends_on_data():
    """Of the same rows laid out in columns it would show other values; where sizes are numbers, layouts tell which."""

    def step(show):
        return lambda w, x: show(w.index_select(0, x.nonzero().view(-1))).sum(0)

    w, count = randn(4, 2, 3), torch.ones(4, dtype=torch.int64)
    values = step(lambda rows: rows.transpose(1, 2))
    memory = step(lambda rows: aten._reshape_alias.default(rows, [rows.shape[0], 6], [6, 1]))
    closed = lambda w, x: aten._reshape_alias.default(w * x[0], [4, 6], [6, 1]).sum(0)  # noqa: E731
    assert verdict(values, values, w, count) == ONE
    assert verdict(closed, closed, w, count) == ONE
    assert verdict(memory, memory, w, count) == REFUSED


# -- random draws and sizes from data -----------------------------------------------------------------


def test_random_draws_have_an_order():
    def step(*names):
        def run(w, x):
            drawn = {name: torch.rand_like(w) for name in names}
            return drawn["a"] * w + drawn["b"] * x

        return run

    assert verdict(step("a", "b"), step("a", "b"), W, S) == ONE
    assert verdict(step("a", "b"), step("b", "a"), W, S) == OTHER
    assert verdict(step("a", "b"), step("c", "a", "b"), W, S) == OTHER


# -- look-alikes that read more -----------------------------------------------------------------------

INDEX, ROWS, HEADS = torch.tensor([[0, 1, 1, 0, 2, 3]] * 4), torch.tensor([0, 1, 1, 3]), randn(2, 2, 4, 8)
attention = torch.nn.functional.scaled_dot_product_attention


def zeros(y):
    return y.new_zeros(4, 6)


def summed_over_ranks(y):
    return c10d.wait_tensor(c10d.reduce_scatter_tensor(y, "sum", 2, "pairs"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("one", "two"),
    [
        (lambda y, x, i, r, q: zeros(y).index_put((r,), y), lambda y, x, i, r, q: zeros(y).index_put((r,), y, True)),
        (
            lambda y, x, i, r, q: zeros(y).index_put((r,), y),
            lambda y, x, i, r, q: zeros(y).index_put((r.flip(0),), y.flip(0)),
        ),
        (
            lambda y, x, i, r, q: zeros(y).index_put_((r,), y, True).index_put_((r,), x, True),
            lambda y, x, i, r, q: zeros(y).index_put_((r,), x, True).index_put_((r,), y, True),
        ),
        (
            lambda y, x, i, r, q: zeros(y).scatter(1, i, y),
            lambda y, x, i, r, q: zeros(y).scatter(1, i.flip(1), y.flip(1)),
        ),
        (
            lambda y, x, i, r, q: zeros(y).scatter_reduce(1, i, y, "amax"),
            lambda y, x, i, r, q: zeros(y).scatter_reduce(1, i, y, "amax", include_self=False),
        ),
        (
            lambda y, x, i, r, q: zeros(y).index_add(0, r, y),
            lambda y, x, i, r, q: zeros(y).index_add(0, r, y, alpha=2),
        ),
        (lambda y, x, i, r, q: y.gather(1, i), lambda y, x, i, r, q: y.gather(1, i.flip(1))),
        (
            lambda y, x, i, r, q: attention(q * y[0, 0], q, q, is_causal=True),
            lambda y, x, i, r, q: attention(q * y[0, 0], q, q),
        ),
        (
            lambda y, x, i, r, q: attention(q * y[0, 0], q, q),
            lambda y, x, i, r, q: attention(q * y[0, 0], q, q, scale=0.3),
        ),
        (lambda y, x, i, r, q: y * i.sum(0), lambda y, x, i, r, q: y * i.sum(0).bfloat16().long()),
        (lambda y, x, i, r, q: y, lambda y, x, i, r, q: y + 0.0),
        (lambda y, x, i, r, q: torch.maximum(y, x), lambda y, x, i, r, q: torch.maximum(x, y)),
        (lambda y, x, i, r, q: y.double().sin().bfloat16(), lambda y, x, i, r, q: y.double().sin().float().bfloat16()),
        (
            lambda y, x, i, r, q: torch.cat([summed_over_ranks(y), summed_over_ranks(x)]),
            lambda y, x, i, r, q: summed_over_ranks(torch.cat([y, x])),
        ),
    ],
)
def test_what_reads_the_same_and_does_something_else_is_not_proved(one, two):
    inputs = W, S, INDEX, ROWS, HEADS
    of = lambda step: lambda w, x, i, r, q: step(w * x, x, i, r, q)  # noqa: E731
    assert verdict(of(one), of(one), *inputs) == ONE
    assert verdict(of(one), of(two), *inputs) == OTHER
