import random
from dataclasses import replace

import pytest
import torch

from bitproof.harness.certificate_checker import (
    FILES,
    RULES,
    RejectedError,
    check_folder,
    load,
    new_state,
    rejecting,
    take_step,
)
from bitproof.harness.powers.proofs.prover.certify import certificate_of, contents_of, write_certificate
from tests.harness.certificate.corruption import corrupt
from tests.harness.certificate.samples import REJECTED, W, X, check, parsed, parts, reduced, said, whole
from tests.harness.powers.proofs.test_canonical import copied
from tests.harness.powers.proofs.test_rules import SOUND
from tests.harness.powers.proofs.toy_graphs import c10d, compare, randn


class Terms:
    """The checker's state, step by step."""

    def __init__(self):
        self.state = new_state()

    def put(self, term, rule="", equals=None, hint=()):
        with rejecting():
            place = len(self.state["terms"])
            step = [term, rule, place if equals is None else equals, *([hint] if hint else [])]
            take_step(self.state, as_json(step))


def as_json(value):
    """Tuples as the lists that JSON has."""
    return [*map(as_json, value)] if isinstance(value, tuple | list) else value


@pytest.fixture(scope="module")
def proof():
    return compare(parts, whole, W, X)


@pytest.fixture(scope="module")
def certificate(proof):
    return certificate_of("example", proof)


def test_what_was_proved_is_accepted(proof, certificate):
    assert proof.verdict == "PROVED"
    assert len(proof.table.used()) > 9, "the example uses most rules"
    assert check(certificate) == {"PROVED": 5}


def test_what_was_not_proved_is_not_claimed_and_cannot_be():
    found = certificate_of("moved", compare(lambda w, x: reduced(w) + reduced(x), lambda w, x: reduced(w + x), W, X))
    assert check(found) == {"NOT PROVED": 1}
    for verdict in ("PROVED", "REFUSED", "MAYBE"):
        with pytest.raises(RejectedError, match="out 0 is NOT PROVED"):
            check(replace(found, answers=(("out 0", verdict),)))


def test_what_was_refused_is_refused_by_the_checker_too():
    def step(w, x):
        y = w * x
        y[0].add_(x[0])
        return y * 1.5, w - x

    found = certificate_of("stale", compare(step, step, W, X))
    assert check(found) == {"REFUSED": 1, "PROVED": 1}
    claimed = tuple((output, "PROVED") for output, _ in found.answers)
    with pytest.raises(RejectedError, match="outputs and answers differ: out 0 is REFUSED"):
        check(replace(found, answers=claimed))


def test_what_was_written_in_flight_is_refused_by_the_checker_too_though_nobody_reads_it():
    def step(write):
        def run(w, x):
            y = w * x
            launch = c10d.all_gather_into_tensor(y, 2, "pairs")
            if write:
                y.neg_()
            return c10d.wait_tensor(launch) * 1.5

        return run

    assert check(certificate_of("read", compare(step(False), step(False), W, X))) == {"PROVED": 1}
    found = certificate_of("written", compare(step(False), step(True), W, X))
    assert check(found) == {"REFUSED": 1}
    with pytest.raises(RejectedError, match="outputs and answers differ: out 0 is REFUSED"):
        check(replace(found, answers=(("out 0", "PROVED"),)))


@pytest.mark.parametrize(
    "wrong",
    [{"wait_offload": False}, {"wait_reload": False}, {"write": "source"}, {"write": "arrival"}, {"keep": False}],
)
def test_copies_that_are_not_waited_for_are_refused_by_the_checker_too(wrong):
    assert check(certificate_of("right", compare(copied(), copied(), W, X))) == {"PROVED": 1}
    found = certificate_of("wrong", compare(copied(), copied(**wrong), W, X))
    assert check(found) == {"REFUSED": 1}
    with pytest.raises(RejectedError, match="outputs and answers differ: out 0 is REFUSED"):
        check(replace(found, answers=(("out 0", "PROVED"),)))


def test_a_view_is_reported_by_its_layout_and_has_no_other_name():
    step = lambda w, x: w[1:3] * x[1:3]  # noqa: E731
    found = certificate_of("rows", compare(step, step, W, X))
    [place] = [i for i, call in enumerate(found.candidate.calls) if call.op == "view"][:1]
    call = found.candidate.calls[place]
    for changed in (
        replace(call, op="aten.exp.default"),
        replace(call, value=replace(call.value, offset=0)),
        replace(call, value=replace(call.value, offset=24)),
        replace(call, value=replace(call.value, storage=99)),
    ):
        calls = (*found.candidate.calls[:place], changed, *found.candidate.calls[place + 1 :])
        with pytest.raises(RejectedError):
            check(replace(found, candidate=replace(found.candidate, calls=calls)))


@pytest.mark.parametrize(
    "change",
    [
        lambda call: replace(call, op="aten.exp.default"),
        lambda call: replace(call, args=(call.args[0], ("1_", 0))),
        lambda call: replace(call, args=(call.args[0], ("1", -1))),
        lambda call: replace(call, args=(("0_", call.args[0][1]), call.args[1])),
    ],
)
def test_a_part_of_several_results_is_taken_by_getitem_alone_though_nobody_reads_it(change):
    step = lambda w, x: ((w + x).sort().indices.numel(), w * x)[1]  # noqa: E731
    found = certificate_of("sorted", compare(step, step, W, X))
    [place] = [i for i, call in enumerate(found.candidate.calls) if call.op == "getitem"][:1]
    calls = list(found.candidate.calls)
    calls[place] = change(calls[place])
    with pytest.raises(RejectedError):
        check(replace(found, candidate=replace(found.candidate, calls=tuple(calls))))


def test_a_size_that_depends_on_data_is_reported_as_one():
    count = torch.ones(4, dtype=torch.int64)
    step = lambda w, x: (w.index_select(0, x.nonzero().view(-1)) * 1.5).sum(0)  # noqa: E731
    found = certificate_of("open", compare(step, step, W, count))
    assert check(found) == {"PROVED": 1}
    calls = found.candidate.calls
    places = [place for place, call in enumerate(calls) if call.results and not call.results[0].is_closed]
    assert len(places) > 2
    for place in places:
        sizes = tuple(n if isinstance(n, int) else ("size_", *n[1:]) for n in calls[place].value.shape)
        changed = replace(calls[place], value=replace(calls[place].value, shape=sizes))
        with pytest.raises(RejectedError):
            others = (*calls[:place], changed, *calls[place + 1 :])
            check(replace(found, candidate=replace(found.candidate, calls=others)))


def test_what_is_waited_for_lies_as_it_was_launched_also_where_a_size_depends_on_data():
    rows = lambda w, x: w.index_select(0, x.nonzero().view(-1))  # noqa: E731
    step = lambda w, x: c10d.wait_tensor(c10d.all_reduce(rows(w, x), "sum", "pairs")).sum(0)  # noqa: E731
    found = certificate_of("open", compare(step, step, W, torch.ones(4, dtype=torch.int64)))
    assert check(found) == {"PROVED": 1}
    calls = found.candidate.calls
    [place] = [place for place, call in enumerate(calls) if "all_reduce" in call.op]
    value = calls[place].value
    assert (value.is_closed, value.shape[1], calls[place + 1].value) == (False, 6, value)
    changed = replace(calls[place], value=replace(value, shape=(value.shape[0], 8)))
    with pytest.raises(RejectedError):
        check(replace(found, candidate=replace(found.candidate, calls=(*calls[:place], changed, *calls[place + 1 :]))))


@pytest.mark.parametrize("rule", SOUND)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_each_rule_is_one_of_the_checkers_and_it_knows_every_call_that_leads_to_one(rule, dtype):
    for one, two in SOUND[rule]:
        found = certificate_of(rule, compare(one, two, randn(12, 6, dtype=dtype), randn(12, 6, dtype=dtype)))
        assert check(found) == {"PROVED": 1}
        used = {step.rule for step in found.steps}
        assert rule in used and used <= {"", *RULES}


def test_a_rule_that_is_not_sound_is_no_rule_of_the_checker():
    from bitproof.harness.powers.proofs.prover import rules
    from tests.harness.powers.proofs.test_rules import reassociate

    unsound = rules.RULES | {"exact": [reassociate, *rules.RULES["exact"]]}
    proof = compare(lambda w, x: (w + x) + w, lambda w, x: w + (x + w), W, X, rules=unsound)
    assert proof.verdict == "PROVED"
    with pytest.raises(RejectedError, match="add of 3 operands"):
        certificate_of("unsound", proof)


LOWER, UPPER = ((2, 6), (6, 1), 12), ((2, 6), (6, 1), 0)  # the last two rows of four, the first two


@pytest.mark.parametrize(
    ("hint", "holds"),
    [
        ((((0, LOWER), (1, UPPER)), 0), True),
        ((((1, UPPER), (0, LOWER)), 0), False),
        ((((0, UPPER), (1, UPPER)), 0), False),
        ((((-2, LOWER), (-1, UPPER)), 0), False),
        ((((0, LOWER), (1, UPPER)), 1), False),
        ((((0, LOWER),),), False),
        ((((0, LOWER), (1, UPPER)),), False),
    ],
)
def test_a_window_on_two_parts_is_its_pieces_joined(hint, holds):
    terms = Terms()
    for term in (
        ("input", "a", "float32", (4, 6)),
        ("input", "b", "float32", (4, 6)),
        ("cat", (0, 1), 0),
        *(("view", place, *rows) for place in (0, 1) for rows in (LOWER, UPPER)),
        ("cat", (3, 6), 0),
        ("cat", (6, 3), 0),
        ("cat", (4, 6), 0),
        ("cat", (3, 6), 1),
    ):
        terms.put(term)
    middle = ("view", 2, (4, 6), (6, 1), 12), "view_of_cat", 7, hint
    if holds:
        terms.put(*middle)
    else:
        with pytest.raises(RejectedError):
            terms.put(*middle)


@pytest.mark.parametrize(
    "w",
    [
        ((2, 6), (6, 1), -12),
        ((2, 6), (-6, 1), 6),
        ((-2, 6), (6, 1), 0),
        ((2, 6), (6, 1), 13),
        ((5, 6), (6, 1), 0),
        ((2, 2, 6), (24, 6, 1), 0),
        ((1, 6), (6, 1), 0),
    ],
)
def test_a_window_that_goes_backwards_or_beyond_the_end_is_none(w):
    """As a hint it would be a part's elements in name, and another part's in place."""
    terms = Terms()
    terms.put(("input", "a", "float32", (4, 6)), "", 0)
    with pytest.raises(RejectedError, match=r"a window shows what is not there|not normal|no term"):
        terms.put(("view", 0, *w), "", 1)
    terms.put(("view", 0, *LOWER), "", 1)


@pytest.mark.parametrize(
    ("hint", "holds"),
    [((0, 0), True), ((-1, 0), False), ((1, 0), False), ((0, 5), False), ((0, 6), False), ((0, 1), False)],
)
def test_neighbours_are_one_where_that_shows_first_the_one_and_then_the_other(hint, holds):
    """Number 5 shows both in the other order, 6 both and one more; -1 would be no neighbours at all."""
    terms = Terms()
    for term in (("input", "a", "float32", (4, 6)), ("view", 0, *UPPER), ("view", 0, *LOWER)):
        terms.put(term)
    terms.put(("view", 0, (4, 6), (6, 1), 0), "view_of_whole", 0)
    terms.put(("cat", (0,), 0), "cat_of_nothing", 0)
    for term in (("input", "b", "float32", (4, 6)), ("input", "c", "float32", (6, 6))):
        terms.put(term)
    for place, rows in ((6, UPPER), (6, LOWER), (5, UPPER), (5, LOWER)):
        terms.put(("view", place, *rows))
    for other in (5, 6):
        terms.put(("cat", (other,), 0), "cat_of_nothing", other)
    joined = ("cat", (1, 2), 0), "cat_of_neighbours", 0, hint
    if holds:
        terms.put(*joined)
    else:
        with pytest.raises(RejectedError):
            terms.put(*joined)


def test_a_longer_term_that_shows_both_neighbours_first_is_not_both():
    terms = Terms()
    first, second = ((2,), (1,), 0), ((2,), (1,), 2)
    for term in (("input", "a", "float32", (6,)), ("view", 0, *first), ("view", 0, *second)):
        terms.put(term)
    terms.put(("cat", (0,), 0), "cat_of_nothing", 0)
    with pytest.raises(RejectedError, match="does not follow"):
        terms.put(("cat", (1, 2), 0), "cat_of_neighbours", 0, (0, 0))
    terms.put(("view", 0, (4,), (1,), 0), "", 4)
    terms.put(("cat", (4,), 0), "cat_of_nothing", 4)
    for place, (window, shown) in enumerate(((first, 1), (second, 2)), 6):
        terms.put(("view", 4, *window), "view_of_view", shown)
        assert terms.state["last"][place] == shown
    terms.put(("cat", (1, 2), 0), "cat_of_neighbours", 4, (0, 4))


@pytest.mark.parametrize("dim", [-1, 1, 2])
def test_parts_are_joined_along_a_dim_that_they_have_and_fit_in_all_others(dim):
    """Along dim -1 a sliding window over three parts would be one over two of them, whatever the third holds."""
    terms = Terms()
    for name in "abc":
        terms.put(("input", name, "float32", (2,)))
    with pytest.raises(RejectedError):
        terms.put(("cat", (0, 1), dim), "", 3)
    terms.put(("cat", (0, 1, 2), 0), "", 3)
    terms.put(("input", "d", "float32", (2, 3)), "", 4)
    with pytest.raises(RejectedError):
        terms.put(("cat", (0, 4), 0), "", 5)
    terms.put(("cat", (4, 4), 1), "", 5)


def test_sums_of_sums_in_halves_are_checked_in_time_that_grows_with_their_number():
    """Each is an operand twice, so there are 2 ** 40 ways to come to the first."""

    def doubled(w, x):
        y = w * x
        for _ in range(40):
            y = y + y
        return y

    halves = lambda w, x: torch.cat([doubled(w[:2], x[:2]), doubled(w[2:], x[2:])])  # noqa: E731
    found = certificate_of("doubled", compare(doubled, halves, W, X))
    assert check(found) == {"PROVED": 1}
    reversed_halves = lambda w, x: torch.cat([doubled(w[2:], x[2:]), doubled(w[:2], x[:2])])  # noqa: E731
    assert check(certificate_of("reversed", compare(doubled, reversed_halves, W, X))) == {"NOT PROVED": 1}


def test_a_rule_that_says_nothing_of_a_term_rewrites_it_to_nothing():
    terms = Terms()
    for name in "ab":
        terms.put(("input", name, "float32", (4, 6)))
    plain = ("exact", "sub", "float32", "cpu", (1, 0))
    for rule in RULES:
        with pytest.raises(RejectedError):
            terms.put(plain, rule, 0)
    terms.put(plain)


def test_every_assumption_must_be_reported(certificate):
    reported = certificate.assumptions
    assert len(reported) == 9, "seven that every proof rests on, that of collectives, and that of buckets"
    for place in range(len(reported)):
        with pytest.raises(RejectedError, match="it does not list the assumption"):
            check(replace(certificate, assumptions=reported[:place] + reported[place + 1 :]))
        changed = reported[place].replace(" ", " not ", 1)
        with pytest.raises(RejectedError, match="it does not list the assumption"):
            check(replace(certificate, assumptions=(*reported[:place], changed, *reported[place + 1 :])))
    assert check(replace(certificate, assumptions=(*reported, "and more"))) == {"PROVED": 5}


@pytest.mark.parametrize("seed", range(8))
def test_a_certificate_with_one_change_is_rejected(certificate, seed):
    chance = random.Random(seed)
    for _ in range(25):
        kind, corrupted = corrupt(certificate, chance)
        with pytest.raises(RejectedError):
            check(corrupted)
            pytest.fail(f"{kind} was changed, and the certificate accepted")


def test_files_hold_the_whole_certificate_and_a_changed_byte_is_seen(certificate, tmp_path):
    write_certificate(certificate, tmp_path)
    main, graphs, steps = load(tmp_path)
    assert [main, *graphs, steps] == parsed(contents_of(certificate))
    for name in FILES:
        text = (tmp_path / name).read_text()
        (tmp_path / name).write_text(text.replace("out", "but", 1) if "out" in text else text.replace("4", "5", 1))
        with pytest.raises(RejectedError, match=f"not what was certified: {name}$"):
            load(tmp_path)
        (tmp_path / name).write_text(text)
    sums = (tmp_path / "SHA256SUMS").read_text()
    (tmp_path / "SHA256SUMS").write_text(sums.replace("steps", "other"))
    with pytest.raises(RejectedError, match="not what was certified"):
        check_folder(tmp_path)


@pytest.mark.parametrize("text", ["", "[", "{}", "[1.5]", "[true]", "[NaN]", '{"calls": []}', "[[1]]", '{"a":1,"a":2}'])
def test_a_file_that_is_none_is_rejected(certificate, text):
    contents = contents_of(certificate)
    assert said(contents) != REJECTED
    for name in FILES:
        assert said({**contents, name: text.encode()}) == REJECTED
