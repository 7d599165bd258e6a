"""The type of each kind of term: what fits, and beside it what nearly does."""

import pytest

from bitproof.harness import certificate_checker as checker
from bitproof.harness.certificate_checker import NUMBER, SEVERAL, STATE, TYPES, RejectedError, rejecting, terms_named
from tests.harness.certificate.test_check import Terms, as_json

PAIR = ((0, 1),)
PARTS = [
    ("float32", (2, 6)),  # 0
    ("float32", (2, 6)),  # 1
    ("float32", (2, 5)),  # 2
    ("bfloat16", (2, 6)),  # 3
    ("float32", (None, 6)),  # 4
    ("float32", (1,)),  # 5
    NUMBER,  # 6
    STATE,  # 7
    SEVERAL,  # 8
    ("int64", (2, 6)),  # 9
    ("float32", (0, 6)),  # 10
    ("bool", (2, 6)),  # 11
]


def read(place, dtype, shape, strides=(6, 1), lead=0):
    return ("tensor", place, dtype, "cpu", shape, strides, lead)


def op(*arguments, dtype="float32", shape=(2,)):
    return ("op", "aten.f", tuple((f"a{i}", x) for i, x in enumerate(arguments)), dtype, shape)


FIT = [
    (("input", "x", "float32", (2, 0)), ("float32", (2, 0))),
    (("view", 0, (6,), (1,), 6), ("float32", (6,))),
    (("cat", (0, 1), 0), ("float32", (4, 6))),
    (("cat", (0, 2), 1), ("float32", (2, 11))),
    (("cat", (0, 10), 0), ("float32", (2, 6))),
    (("exact", "add", "float32", "cpu", (0, 1)), ("float32", (2, 6))),
    (("exact", "cast", "float32", "cpu", (3,)), ("float32", (2, 6))),
    (("exact", "neg", "float32", "cpu", (4,)), ("float32", (None, 6))),
    (("exact", "add", "int64", "cpu", (9, 9)), ("int64", (2, 6))),
    (("exact", "ge", "bool", "cpu", (9, 9)), ("bool", (2, 6))),
    (("exact", "bitwise_or", "bool", "cpu", (11, 11)), ("bool", (2, 6))),
    (("exact", "where", "int64", "cpu", (11, 9, 9)), ("int64", (2, 6))),
    (("number", "float16", (-0.0).hex()), ("float16", ())),
    (("number", "bfloat16", (2.0**-133).hex()), ("bfloat16", ())),
    (("number", "int64", (-3.0).hex()), ("int64", ())),
    (("gather", 0, PAIR), ("float32", (2, 2, 6))),
    (("reduce", 0, "sum in float32 on cpu", PAIR), ("float32", (6,))),
    (("out", 8, 1, "int64", (None,)), ("int64", (None,))),
    (("item", 5), NUMBER),
    (("extent", 4, 0), NUMBER),
    (("rows", (3, ("size", (1, 6)))), NUMBER),
    (("draws", 0), STATE),
    (("fresh", "candidate", 3, "float32", (2, None)), ("float32", (2, None))),
    (op(read(0, "float32", (2, 6)), ("list", 3, ("none",))), ("float32", (2,))),
    (op(read(4, "float32", (("size", (1, 6)), 6))), ("float32", (2,))),
    (("op", "aten.rand", (("generator", ("value", 7)),), "float32", (2,)), ("float32", (2,))),
    (("move", "reshape", (("self", ("value", 4)), ("shape", ("list", ("size", (6, 6))))), "float32", (None,)), None),
]

UNFIT = [
    ("input", "x", "float32", (2, -1)),
    ("input", "x", "float32", (2, True)),
    ("input", "x", "float32", (2, None)),
    ("input", 3, "float32", (2,)),
    ("constant", "x", 32, (2,)),
    ("view", 0, (6,), (1,), 7),
    ("view", 0, (-1, 0), (0, 0), 0),
    ("view", 4, (6,), (1,), 0),
    ("view", 6, (1,), (0,), 0),
    ("cat", (), 0),
    ("cat", (0, 2), 0),
    ("cat", (0, 3), 0),
    ("cat", (0, 5), 0),
    ("cat", (0, 1), 2),
    ("cat", (0, 1), -1),
    ("cat", (0, 1), True),
    ("cat", (4, 4), 1),
    ("exact", "add", "float32", "cpu", (0, 2)),
    ("exact", "add", "float32", "cpu", (0, 5)),
    ("exact", "add", "float32", "cpu", (0, 4)),
    ("exact", "add", "float32", "cpu", (0, 3)),
    ("exact", "add", "bfloat16", "cpu", (0, 1)),
    ("exact", "add", "bool", "cpu", (11, 11)),
    ("exact", "sub", "bool", "cpu", (11, 11)),
    ("exact", "neg", "bool", "cpu", (11,)),
    ("exact", "eq", "float32", "cpu", (0, 1)),
    ("exact", "lt", "bool", "cpu", (11, 11)),
    ("exact", "lt", "bool", "cpu", (0, 3)),
    ("exact", "bitwise_and", "float32", "cpu", (0, 1)),
    ("exact", "bitwise_not", "bool", "cpu", (9,)),
    ("exact", "where", "float32", "cpu", (9, 0, 1)),
    ("exact", "where", "float32", "cpu", (11, 0, 3)),
    ("exact", "where", "float32", "cpu", (11, 0)),
    ("exact", "where", "bool", "cpu", (11, 0, 1)),
    ("number", "float32", "1"),
    ("number", "float32", "inf"),
    ("number", "float32", "nan"),
    ("number", "float32", (0.1).hex()),
    ("number", "float32", (2.0**128).hex()),
    ("number", "float16", (2.0**-25).hex()),
    ("number", "bfloat16", (257.0).hex()),
    ("number", "int32", (2.0**31).hex()),
    ("number", "int64", (0.5).hex()),
    ("number", "int64", (-0.0).hex()),
    ("number", "bool", (2.0).hex()),
    ("number", "int8", (1.0).hex()),
    ("number", "complex64", (1.0).hex()),
    ("exact", "add", "float32", "cpu", (0,)),
    ("exact", "add", "float32", "cpu", (0, 1, 1)),
    ("exact", "neg", "float32", "cpu", (0, 1)),
    ("exact", "neg", "float32", "cpu", ()),
    ("exact", "div", "float32", "cpu", (0, 1)),
    ("exact", "cast", "float32", "cpu", (9,)),
    ("exact", "cast", "int64", "cpu", (0,)),
    ("exact", "add", "float32", "cpu", (6, 6)),
    ("gather", 0, ((0, 0),)),
    ("gather", 0, ((0,), (1, 2))),
    ("gather", 0, ()),
    ("gather", 0, ((),)),
    ("gather", 4, PAIR),
    ("gather", 8, PAIR),
    ("reduce", 0, "sum in float32 on cpu", ((0, 1, 2),)),
    ("reduce", 0, "sum in bfloat16 on cpu", PAIR),
    ("reduce", 5, "sum in float32 on cpu", ((0,),)),
    ("out", 0, 0, "float32", (2,)),
    ("out", 8, -1, "float32", (2,)),
    ("out", 8, 0, None, None),
    ("item", 0),
    ("item", 6),
    ("extent", 4, 1),
    ("extent", 4, 2),
    ("extent", 4, -1),
    ("extent", 6, 0),
    ("rows", (-1,)),
    ("rows", (("size", (1, 0)),)),
    ("draws", 6),
    ("fresh", "both", 3, "float32", (2,)),
    ("seed", 1),
    ("sum", 0),
    (),
    op(read(0, "bfloat16", (2, 6))),
    op(read(0, "float32", (2, 5))),
    op(read(0, "float32", (2, 6), (1,))),
    op(read(0, "float32", (2, 6), lead=-1)),
    op(read(4, "float32", (2, 6))),
    op(read(0, "float32", (("size", (1, 6)), 6))),
    op(read(4, "float32", (("size", (1, 0)), 6))),
    op(read(6, "float32", ())),
    op(("value", 0)),
    op(("value", 7)),
    op(("word", "x")),
    op(("float", 1)),
    op(1.5),
    op(dtype=None),
    ("op", "aten.rand", (("generator", ("value", 0)),), "float32", (2,)),
    ("move", "reshape", (("self", ("value", 6)),), "float32", (None,)),
]


def type_of(term):
    """The type of a term made of PARTS."""
    with rejecting():
        term, types = as_json(term), [*map(as_json, PARTS)]
        places = terms_named(term)
        assert all(0 <= place < len(types) for place in places), "a place that no step has"
        return TYPES[term[0]](types, *term[1:])


@pytest.mark.parametrize(("term", "expected"), FIT)
def test_a_term_has_a_type_by_what_it_is_made_of(term, expected):
    assert type_of(term) == as_json(expected or ("float32", (None,)))


@pytest.mark.parametrize("term", UNFIT, ids=str)
def test_a_term_whose_parts_do_not_fit_has_none(term):
    with pytest.raises(RejectedError):
        type_of(term)


def test_a_step_leaves_its_terms_type_as_it_is(monkeypatch):
    monkeypatch.setitem(checker.RULES, "view_of_whole", lambda state, term: term[1])
    terms = Terms()
    terms.put(("input", "x", "float32", (2, 6)))
    with pytest.raises(RejectedError, match="step 1 does not follow by view_of_whole, or changes its type"):
        terms.put(("view", 0, (12,), (1,), 0), "view_of_whole", 0)
