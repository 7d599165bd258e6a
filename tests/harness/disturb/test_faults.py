import pytest
import torch

from bitproof.harness.case import Case, Parallelism
from bitproof.harness.disturb.faults import (
    FlipBit,
    HangRank,
    Injector,
    KillRank,
    Raise,
    SumOrder,
    check_fault,
    parse_fault,
)
from bitproof.harness.errors import UsageError

CASE = Case(
    name="toy", family="toy", reference="eager", candidate="graph", steps=4, parallelism=Parallelism(world_size=2)
)
KNOWN = (
    "flip-bit:grad|param|buffer|optimizer=NAME,rank=N,step=N,[bit=0],[element=0]; kill-rank:rank=N,step=N; "
    "hang-rank:rank=N,step=N; raise:rank=N,step=N; "
    "sum-order:order=NAME,[step=0]; or a name of the catalogue, which `bitproof faults --list` shows"
)


def refusal(function, *args):
    with pytest.raises(UsageError) as error:
        function(*args)
    return str(error.value)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("flip-bit:grad=a.b,rank=3,step=4", FlipBit(grad="a.b", rank=3, step=4)),
        ("flip-bit:element=2,bit=9,grad=w,rank=0,step=0", FlipBit(grad="w", rank=0, step=0, bit=9, element=2)),
        (
            "flip-bit:buffer=moe.counts@after_optimizer,rank=1,step=0",
            FlipBit(buffer="moe.counts@after_optimizer", rank=1, step=0),
        ),
        ("flip-bit:optimizer=w.exp_avg,rank=1,step=0", FlipBit(optimizer="w.exp_avg", rank=1, step=0)),
        ("kill-rank:rank=2,step=1", KillRank(rank=2, step=1)),
        ("hang-rank:rank=2,step=1", HangRank(rank=2, step=1)),
        ("raise:rank=2,step=1", Raise(rank=2, step=1)),
        ("sum-order:order=descending", SumOrder(order="descending")),
        ("sum-order:order=position,step=3", SumOrder(order="position", step=3)),
    ],
)
def test_a_fault_reads_and_writes_its_text(text, fault):
    assert parse_fault(text) == fault
    assert parse_fault(str(fault)) == fault


def test_an_unknown_fault_is_refused_listing_the_known_ones():
    assert (
        refusal(parse_fault, "flip:rank=1")
        == f"UsageError: unknown fault 'flip'\n  expected: {KNOWN}\n  fix: did you mean flip-bit?"
    )


@pytest.mark.parametrize("item", ["when=1", "rank", "rank=", "rank=1"])
def test_an_item_that_is_no_field_is_refused(item):
    assert refusal(parse_fault, f"raise:rank=0,{item}") == (
        f"UsageError: fault raise does not understand {item!r}\n  expected: raise:rank=N,step=N"
    )


@pytest.mark.parametrize("value", ["-1", "x", "1.5", "²"])
def test_a_number_that_is_none_is_refused(value):
    assert refusal(parse_fault, f"raise:rank={value},step=0") == (
        f"UsageError: fault raise does not understand 'rank={value}'\n  expected: an integer of 0 or more"
    )


def test_a_missing_field_is_named():
    assert refusal(parse_fault, "flip-bit:rank=0") == (
        "UsageError: fault flip-bit lacks step\n"
        "  expected: flip-bit:grad|param|buffer|optimizer=NAME,rank=N,step=N,[bit=0],[element=0]\n"
        "  found: 'flip-bit:rank=0'"
    )


@pytest.mark.parametrize(("given", "found"), [("", "none"), (",param=a,buffer=b", "param=a and buffer=b")])
def test_a_flipped_bit_is_one_tensors(given, found):
    assert refusal(parse_fault, f"flip-bit:rank=0,step=0{given}") == (
        "UsageError: fault flip-bit takes one tensor\n"
        f"  expected: grad=NAME or param=NAME or buffer=NAME or optimizer=NAME\n  found: {found}"
    )


def test_a_fault_that_the_case_never_reaches_is_refused():
    check_fault(Raise(rank=1, step=3), CASE)
    assert refusal(check_fault, Raise(rank=1, step=4), CASE) == (
        "UsageError: fault raise:rank=1,step=4 never fires in case toy\n  expected: step in 0..3\n  found: step=4"
    )
    assert refusal(check_fault, Raise(rank=2, step=3), CASE) == (
        "UsageError: fault raise:rank=2,step=3 never fires in case toy\n  expected: rank in 0..1\n  found: rank=2"
    )


def test_an_order_of_sums_is_one_that_is_known_and_is_every_ranks():
    assert refusal(parse_fault, "sum-order:order=random") == (
        "UsageError: unknown order of sums\n  expected: descending, pairwise, position\n  found: random"
    )
    check_fault(SumOrder(order="pairwise", step=3), CASE)
    assert refusal(check_fault, SumOrder(order="pairwise", step=4), CASE).endswith("found: step=4")
    assert all(Injector(SumOrder(order="pairwise"), rank).fault for rank in (0, 1))


def test_an_order_of_sums_that_nothing_was_added_in_is_an_error():
    injector = Injector(SumOrder(order="pairwise"), 1)
    injector.begin_step(0)
    assert refusal(injector.check_fired).startswith("UsageError: fault sum-order:order=pairwise,step=0 never fired\n")
    injector.fire()
    injector.check_fired()


def flip(fault, rank=1, dtype=torch.bfloat16):
    injector = Injector(fault, rank)
    gradients = {"w": torch.ones(2, 3, dtype=dtype).t(), "v": torch.ones(1)}
    function = injector.wrap(lambda inputs: (torch.tensor(1.0), dict(gradients)))
    found = []
    for step in range(3):
        injector.begin_step(step)
        found.append(function(None)[1])
    return injector, gradients, found


def test_exactly_one_bit_flips_on_its_rank_at_its_step():
    injector, gradients, found = flip(FlipBit(grad="w", rank=1, step=1, element=4, bit=9))
    injector.check_fired()
    differences = [
        (found[step][name].contiguous().view(torch.uint8) ^ gradients[name].contiguous().view(torch.uint8)).flatten()
        for step in range(3)
        for name in ("w", "v")
    ]
    assert [int(d.sum()) for d in differences] == [0, 0, 2, 0, 0, 0]
    assert differences[2].nonzero().item() == 4 * 2 + 1
    assert torch.equal(gradients["w"], torch.ones(3, 2, dtype=torch.bfloat16)), "the system's own tensor is untouched"


def test_the_systems_own_contiguous_gradient_is_left_alone():
    _, gradients, found = flip(FlipBit(grad="v", rank=1, step=1, bit=31))
    assert [step["v"].item() for step in found] == [1.0, -1.0, 1.0]
    assert gradients["v"].item() == 1.0


def test_no_other_rank_notices():
    injector, gradients, found = flip(FlipBit(grad="w", rank=0, step=1))
    injector.check_fired()
    assert all(torch.equal(step["w"], gradients["w"]) for step in found)


def test_a_name_that_is_no_gradient_is_refused_naming_one_that_is():
    assert refusal(flip, FlipBit(grad="vv", rank=1, step=1)) == (
        "UsageError: fault flip-bit:rank=1,step=1,grad=vv,bit=0,element=0 names no gradient\n"
        "  expected: a gradient such as v\n"
        "  found: vv"
    )


@pytest.mark.parametrize(("element", "bit"), [(6, 0), (0, 16)])
def test_a_bit_outside_the_gradient_is_refused(element, bit):
    assert refusal(flip, FlipBit(grad="w", rank=1, step=1, element=element, bit=bit)) == (
        f"UsageError: fault flip-bit:rank=1,step=1,grad=w,bit={bit},element={element} lies outside the gradient\n"
        "  expected: element in 0..5 and bit in 0..15\n"
        f"  found: element={element}, bit={bit}"
    )


def shown(fault, wraps=False):
    """A system's own tensor, as it is after it was recorded at step 1 on rank 1; and as it was recorded, by kind."""
    injector, tensor, seen = Injector(fault, 1), torch.ones(2, 3).T, {}
    if wraps:
        injector.wrap(lambda inputs: (None, {}))
    observe = injector.flipping(lambda kind, name, tensor: seen.setdefault((injector.step, kind), tensor.clone()))
    for step in (0, 1, 2):
        injector.begin_step(step)
        for kind in ("buffer", "grad"):
            observe(kind, "w", tensor)
    injector.check_fired()
    return tensor, seen


def test_what_a_system_shows_is_flipped_in_place_where_its_function_cannot_be_wrapped():
    flipped, seen = shown(FlipBit(grad="w", rank=1, step=1, bit=31, element=1))
    assert flipped.tolist() == [[1, -1], [1, 1], [1, 1]] and torch.equal(seen[1, "grad"], flipped)
    assert torch.equal(shown(FlipBit(grad="w", rank=0, step=1, bit=31))[0], torch.ones(3, 2))
    assert refusal(shown, FlipBit(grad="ww", rank=1, step=1)) == (
        "UsageError: fault flip-bit:rank=1,step=1,grad=ww,bit=0,element=0 names no gradient\n"
        "  expected: a gradient such as w\n"
        "  found: ww"
    )


@pytest.mark.parametrize("wraps", [False, True])
def test_a_buffer_is_flipped_in_memory_before_it_is_recorded_and_stays_so(wraps):
    flipped, seen = shown(FlipBit(buffer="w", rank=1, step=1, bit=31, element=1), wraps)
    assert flipped.tolist() == [[1, -1], [1, 1], [1, 1]]
    assert [bool((seen[step, "buffer"] < 0).any()) for step in (0, 1, 2)] == [False, True, True]
    assert refusal(shown, FlipBit(buffer="x", rank=1, step=1)) == (
        "UsageError: fault flip-bit:rank=1,step=1,buffer=x,bit=0,element=0 names no buffer\n"
        "  expected: a buffer such as w\n"
        "  found: x"
    )


def test_a_kind_that_a_system_does_not_record_is_refused():
    assert refusal(shown, FlipBit(optimizer="w.exp_avg", rank=1, step=1)) == (
        "UsageError: fault flip-bit:rank=1,step=1,optimizer=w.exp_avg,bit=0,element=0 names no state of an optimizer\n"
        "  expected: a system that records a state of an optimizer\n"
        "  found: w.exp_avg"
    )


def test_a_gradient_whose_function_was_wrapped_is_not_flipped_a_second_time():
    injector = Injector(FlipBit(grad="w", rank=1, step=0), 1)
    injector.wrap(lambda inputs: (None, {}))
    injector.begin_step(0)
    tensor = torch.ones(1)
    injector.flipping(lambda kind, name, tensor: None)("grad", "w", tensor)
    assert tensor.item() == 1 and not injector.fired


def test_a_fault_that_did_not_fire_is_an_error():
    injector = Injector(FlipBit(grad="w", rank=1, step=1), 1)
    injector.begin_step(0)
    injector.check_fired()  # a replay may end before the fault's step
    injector.begin_step(1)
    assert refusal(injector.check_fired).startswith(
        "UsageError: fault flip-bit:rank=1,step=1,grad=w,bit=0,element=0 never fired\n"
    )
