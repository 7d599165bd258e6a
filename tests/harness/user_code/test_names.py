"""Declared names."""

from __future__ import annotations

import pytest

from bitproof.harness.errors import UsageError
from bitproof.harness.user_code.names import Names, read_names


def names(rules):
    return Names(rules, "a test")


@pytest.mark.parametrize(
    ("rules", "own", "name"),
    [
        ({}, "w", "w"),
        ({"a": "b"}, "a", "b"),
        ({"a": "b"}, "a.exp_avg", "a.exp_avg"),
        ({"model.*": "*"}, "model.layers.0.w", "layers.0.w"),
        ({"model.*": "*"}, "the_model.w", "the_model.w"),
        ({"*.wrapped.*": "*.*"}, "layers.0.wrapped.w", "layers.0.w"),
        ({"layers.*.up.*": "layers.*.w1.*"}, "layers.12.up.weight.exp_avg", "layers.12.w1.weight.exp_avg"),
        ({"model.*": "*", "model.head": "output"}, "model.head", "output"),
        ({"model.head.*": "output.*", "model.*": "*"}, "model.head.w", "output.w"),
        ({"a.b": "c"}, "axb", "axb"),
        ({"a": r"\1", "b*": r"\g<0>*"}, "bc", r"\g<0>c"),
    ],
)
def test_a_rule_translates_and_what_has_none_stays(rules, own, name):
    assert names(rules).translate(own) == name


def test_rules_that_nothing_used_are_known():
    declared = names({"model.*": "*", "head": "output", "gone": "away", "old.*": "new.*"})
    for own in ("model.w", "head", "w"):
        declared.translate(own)
    assert list(declared.unused) == ["gone", "old.*"]


def refusal(call, *arguments):
    with pytest.raises(UsageError) as error:
        call(*arguments)
    return str(error.value)


def test_a_mapping_of_two_names_to_one_is_refused():
    assert refusal(names, {"a": "w", "b": "w"}) == (
        "UsageError: two names are mapped to 'w'\n"
        "  expected: a name of its own for every tensor\n"
        "  found: 'a' and 'b'\n"
        "  came from: a test"
    )
    names({"a.*": "*", "b.*": "*"})  # whether these collide, only the names tell


@pytest.mark.parametrize("rule", [("a.*", "b"), ("a", "b.*"), ("", "b"), ("a", ""), ("a", 1), (1, "a")])
def test_what_is_no_rule_is_refused(rule):
    assert refusal(names, dict([rule])) == (
        f"UsageError: the rule for name {rule[0]!r} is no rule\n"
        "  expected: two texts with the same number of *, such as "
        '{"model.embed.weight": "tok_embeddings.weight", "model.*": "*"}\n'
        f"  found: {rule[1]!r}\n"
        "  came from: a test"
    )


def test_a_file_of_names_is_one_json_object(tmp_path):
    file = tmp_path / "names.json"
    file.write_text('{"model.*": "*", "head": "output"}')
    assert read_names(file) == {"model.*": "*", "head": "output"}


@pytest.mark.parametrize(
    ("text", "reported"),
    [
        ("[]", "names are declared as a mapping\n"),
        ("{", "the file of names is not JSON\n"),
        ("\xff", "the file of names is not JSON\n"),
        ('{"a": "b", "a": "c"}', "the file of names is not JSON\n  found: it maps 'a' twice\n"),
        ('{"a": {"b": "c"}}', "the rule for name 'a' is no rule\n"),
    ],
)
def test_a_file_that_holds_no_mapping_is_refused_by_its_path(tmp_path, text, reported):
    file = tmp_path / "names.json"
    file.write_bytes(text.encode("latin-1"))
    text = refusal(read_names, file)
    assert text.startswith(f"UsageError: {reported}")
    assert text.endswith(f"came from: {file}")


def test_a_file_of_names_that_is_not_there_is_refused(tmp_path):
    assert refusal(read_names, tmp_path / "no.json").endswith(
        f"\n  found: {tmp_path / 'no.json'}: No such file or directory"
    )


def test_a_rule_of_many_stars_is_decided_at_once():
    rules = names({"*" * 25 + "b": "*" * 25 + "c"})
    assert rules.translate("a" * 60) == "a" * 60
    assert rules.translate("a" * 60 + "b") == "a" * 60 + "c"
    assert names({"*ab*b": "*.*"}).translate("xabab.b") == "x.ab."
