from __future__ import annotations

import itertools
import re

import pytest

from bitproof.harness.case import Case, Chunking
from bitproof.harness.case.select import asks_for, compile_expression, select
from bitproof.harness.errors import UsageError

NAMES = ("moe_seq", "moe_batch", "transformer_batch")
CASES = [Case(name=name, family="chunking", chunking=Chunking(dim="seq", modules="*")) for name in NAMES]


def names(expression):
    return [case.name for case in select(CASES, expression)]


@pytest.mark.parametrize(
    ("expression", "selected"),
    [
        (None, NAMES),
        (" ", NAMES),
        ("moe", NAMES[:2]),
        ("MOE", NAMES[:2]),
        ("moe and batch", ["moe_batch"]),
        ("moe and not batch", ["moe_seq"]),
        ("seq or transformer", ["moe_seq", "transformer_batch"]),
        ("not (seq or transformer)", ["moe_batch"]),
        ("seq or moe and batch", ["moe_seq", "moe_batch"]),
        ("chunk", NAMES),
        ("nothing or not nothing", NAMES),
    ],
)
def test_an_expression_selects_by_name_and_family_in_case_order(expression, selected):
    assert names(expression) == list(selected)


def test_selecting_nothing_is_refused_with_where_the_names_are():
    with pytest.raises(UsageError) as error:
        select(CASES, "llama")
    assert (error.value.found, error.value.fix) == ("-k 'llama'", None)
    assert error.value.expected is not None and "`bitproof list`" in error.value.expected


def test_a_wrong_expression_is_refused_pointing_at_the_column():
    with pytest.raises(UsageError) as error:
        select(CASES, "moe and )")
    assert error.value.what.endswith(" column 9\n  moe and )\n          ^") and error.value.found == "')'"


WORDS = ("and", "or", "not", "(", ")", "a", "b", "a-b[c]", "!")
EXPRESSIONS = [" ".join(words) for size in range(1, 5) for words in itertools.product(WORDS, repeat=size)]
ODD = ["a(b)", "a (b)", "notb", "not-b", "a\tand\tb", "a::b", "a\nb", "a=b", "'a'", "True", "None and a", "((a))"]


def is_call(text):
    return re.search(r"(?<!\S)(?!(?:and|or|not)\s)[\w\[\]-]+\s*\(", text.replace("(", " ( "))


@pytest.mark.parametrize("true_names", [(), ("a",), ("b",), ("a", "a-b[c]")], ids=str)
def test_expressions_mean_and_fail_what_pytest_says(true_names):
    """Over all expressions of up to four words. pytest takes `name(` for a call, so columns differ there."""
    expression_type = pytest.importorskip("_pytest.mark.expression").Expression
    for text in [*EXPRESSIONS, *ODD]:
        try:
            theirs = expression_type.compile(text).evaluate(lambda name, /, **kwargs: name in true_names)
        except SyntaxError as error:
            theirs = "refused" if is_call(text) else f"column {error.offset}"
        try:
            ours = compile_expression(text)(lambda name: name in true_names)
        except UsageError as error:
            ours = "refused" if is_call(text) else "column " + error.what.split("column ")[1].split("\n")[0]
        assert ours == theirs, text


@pytest.mark.parametrize(
    ("expression", "asks"),
    [
        ("moe_seq", True),
        ("a or b", True),
        ("a and not b", True),
        ("not a", False),
        ("not (a or b)", False),
        ("", False),
    ],
)
def test_an_expression_asks_for_cases_when_no_name_it_leaves_out_would_do(expression, asks):
    assert asks_for(expression) is asks


@pytest.mark.parametrize("word", ["or", "and"])
def test_an_expression_may_have_as_many_terms_as_it_likes(word):
    assert names(f" {word} ".join(["moe"] * 20_000)) == list(NAMES[:2])


def test_not_may_stand_as_often_as_it_likes():
    assert names("not " * 20_000 + "moe") == list(NAMES[:2])
    assert names("not " * 20_001 + "moe") == ["transformer_batch"]


def test_parentheses_within_each_other_have_a_limit():
    assert names("(" * 50 + "moe" + ")" * 50) == list(NAMES[:2])
    for depth in (51, 5_000, 100_000):
        with pytest.raises(UsageError, match="at column 52") as error:
            select(CASES, "(" * depth + "moe" + ")" * depth)
        assert error.value.expected == "at most 50 parentheses within each other"
        assert len(str(error.value)) < 1000


def test_parentheses_beside_each_other_have_none():
    assert names(" and ".join(["(moe)"] * 5_000)) == list(NAMES[:2])
    assert names("not (" * 50 + "moe" + ")" * 50) == list(NAMES[:2])


def test_a_long_wrong_expression_is_shown_around_its_column():
    with pytest.raises(UsageError) as error:
        select(CASES, " or ".join(["moe"] * 5_000) + " )")
    assert len(str(error.value)) < 1000
    with pytest.raises(UsageError) as error:
        select(CASES, " and ".join(["llama"] * 5_000))
    assert len(str(error.value)) < 1000
