from __future__ import annotations

import stat

import pytest

from bitproof.harness.machine.compiler import compiled_for, compiler, compiler_problem


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Make a program of shell lines and let CXX name it."""

    def make(lines: str) -> str:
        path = tmp_path / "cxx"
        path.write_text(f"#!/bin/sh\n{lines}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("CXX", str(path))
        return str(path)

    return make


def test_the_compiler_is_what_cxx_names_else_gxx(monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    assert compiler() == "g++"
    monkeypatch.setenv("CXX", "clang++")
    assert compiler() == "clang++"


def test_a_compiler_that_compiles_is_no_problem(program):
    program('grep -q "int main" "$2" && touch "$4"')
    assert compiler_problem() is None


def test_a_compiler_that_fails_is_reported_with_its_first_words(program):
    path = program("echo no such header >&2; exit 4")
    assert compiler_problem() == f"{path} ends with status 4 on a one-line program: no such header"


def test_a_missing_compiler_is_reported(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "/nonexistent")
    assert compiler_problem() == "no program /nonexistent is found"
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert compiler_problem() == "no program g++ is found"


def test_code_is_for_a_compiler_of_a_version_and_a_processor(program, monkeypatch):
    path = program("echo cxx 13.2; echo more")
    assert compiled_for()[:2] == [path, "cxx 13.2"]
    assert len(compiled_for()[2]) in (0, 64), "a hash where the system lists what the processor has"
    monkeypatch.setenv("CXX", "/no/such/compiler")
    assert compiled_for()[1].startswith("cannot be run: ")
