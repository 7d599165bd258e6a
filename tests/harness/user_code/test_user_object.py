"""Functions and classes that a caller hands over, by the name under which a rank finds them."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from bitproof.harness.errors import UsageError
from bitproof.harness.user_code import user_object
from bitproof.harness.user_code.user_object import source_of


def factory(case, mesh):
    return None


class Holder:
    def method(self, case, mesh):
        return None

    class Inner:
        pass


replaced = factory


def factory(case, mesh):
    return None


def test_a_function_and_a_class_are_reported_by_file_and_name_relative_to_the_working_directory(monkeypatch, tmp_path):
    monkeypatch.chdir(Path(__file__).parent)
    assert source_of(factory) == "test_user_object.py:factory"
    assert source_of(Holder.Inner) == "test_user_object.py:Holder.Inner"
    monkeypatch.chdir(tmp_path)
    assert source_of(factory) == f"{Path(__file__).resolve()}:factory"


def _inside():
    def inner(case, mesh):
        return None

    return inner


@pytest.mark.parametrize(
    ("given", "why", "found"),
    [
        (lambda case, mesh: None, "it has no name", "a lambda"),
        (_inside(), "what it holds of that call is nowhere else", "_inside.<locals>.inner, which is made inside"),
        (functools.partial(factory), "it is made while the caller runs", "an object of type partial"),
        (Holder().method, "it is made while the caller runs", "an object of type method"),
        (replaced, "the name stands for something else", "factory of "),
        (int, "it was not read from a Python file", "int of builtins"),
    ],
)
def test_what_no_rank_could_find_again_is_refused_with_the_way_out(given, why, found):
    with pytest.raises(UsageError) as error:
        source_of(given)
    assert why in str(error.value) and found in str(error.value) and user_object.WAY_OUT in str(error.value)
