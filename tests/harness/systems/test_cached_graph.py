"""A graph that was kept is the one that was traced, in code and bits; what could be another one is traced anew."""

from __future__ import annotations

import functools
import hashlib
import json
import time
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bitproof.builtin_cases import chunking
from bitproof.harness.localize.logs.node_call_sites import place_of
from bitproof.harness.runtime import sources
from bitproof.harness.runtime.sources import Installation, read_sources
from bitproof.harness.systems.cached_graph import keep_program, read_program
from bitproof.harness.systems.graph import prepare
from bitproof.harness.systems.graph_key import GraphCache, graph_cache_of, traced_part
from bitproof.harness.systems.graph_program import GraphProgram
from tests.small import small

CASE = small(chunking.moe_seq)


@functools.cache
def installed() -> Installation:
    return Installation(read_sources(), "others")


@functools.cache
def traced() -> GraphProgram:
    return prepare(traced_part(CASE), torch.device("cpu"))


@pytest.fixture(autouse=True)
def looked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that looked at its files before it loaded them."""
    monkeypatch.setattr(sources, "at_start", (time.time(), installed().sources))


@pytest.fixture
def graph_cache(tmp_path: Path) -> GraphCache:
    found = graph_cache_of(CASE, tmp_path / "graphs", installed())
    assert found is not None
    return found


def only_file(graph_cache: GraphCache) -> Path:
    [file] = graph_cache.folder.iterdir()
    return file


def test_a_kept_program_is_the_traced_one_but_for_times(graph_cache: GraphCache) -> None:
    program = traced()
    assert read_program(graph_cache) is None
    assert keep_program(graph_cache, program, CASE)
    found = read_program(graph_cache)
    assert found is not None and found.is_kept and not program.is_kept
    assert found.module.code == program.module.code and found.code_hash == program.code_hash
    assert found.run is found.module
    for name in ("parameter_names", "buffer_names", "groups", "chunked"):
        assert getattr(found, name) == getattr(program, name)
    lines = [json.dumps(vars(replace(entry, seconds=0.0)), sort_keys=True) for entry in program.passes]
    assert [json.dumps(vars(entry), sort_keys=True) for entry in found.passes] == lines
    assert [place_of(node) for node in found.module.graph.nodes] == [place_of(n) for n in program.module.graph.nodes]


def test_hazards_of_a_kept_program_are_those_that_were_found_when_it_was_made(graph_cache: GraphCache) -> None:
    wrong = replace(traced())
    wrong.set_hazards(["a hazard that no kept graph shows"])
    keep_program(graph_cache, wrong, CASE)
    found = read_program(graph_cache)
    assert found is not None and found.hazards(CASE) == ["a hazard that no kept graph shows"]
    keep_program(graph_cache, traced(), CASE)
    found = read_program(graph_cache)
    assert found is not None and found.hazards(CASE) == []
    _rewrite(graph_cache, lambda value: value.pop("hazards"))
    assert read_program(graph_cache) is None


def test_another_cases_program_is_not_found(graph_cache: GraphCache) -> None:
    keep_program(graph_cache, traced(), CASE)
    other = graph_cache_of(replace(CASE, seed=1), graph_cache.folder, graph_cache.installation)
    assert other is not None and read_program(other) is None


def _rewrite(graph_cache: GraphCache, change: Any) -> None:
    """Change what is kept, and make its hash right again: as somebody who knows the form would."""
    file = only_file(graph_cache)
    kept = json.loads(zlib.decompress(file.read_bytes()[32:]))
    change(kept["value"]["value"])
    packed = zlib.compress(json.dumps(kept).encode())
    file.write_bytes(hashlib.sha256(packed).digest() + packed)


def _another_operator(value: Any) -> None:
    node = next(node for node in value["graph"]["nodes"] if node[2] == "aten.mm.default")
    node[2] = "aten.mul.Tensor"


def _another_group(value: Any) -> None:
    text = json.dumps(value["graph"])
    value["graph"] = json.loads(text.replace('"fsdp"', '"ep"', 1))
    assert json.dumps(value["graph"]) != text


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (_another_operator, "it has other code than was kept"),
        (_another_group, "it has other code than was kept"),
        (lambda value: value.pop("groups"), "'groups'"),
        (lambda value: value["graph"]["nodes"][-1].pop(), "not a valid graph file"),
    ],
)
def test_what_is_whole_and_says_another_graph_is_not_used(
    change: Any, why: str, graph_cache: GraphCache, caplog: pytest.LogCaptureFixture
) -> None:
    keep_program(graph_cache, traced(), CASE)
    _rewrite(graph_cache, change)
    assert read_program(graph_cache) is None
    assert why in caplog.text and "the kept graph is not used" in caplog.text


def test_a_flipped_byte_is_seen(graph_cache: GraphCache) -> None:
    keep_program(graph_cache, traced(), CASE)
    file = only_file(graph_cache)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    assert read_program(graph_cache) is None


def test_what_was_made_while_files_changed_is_not_kept(
    graph_cache: GraphCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "read_sources", lambda: replace(graph_cache.installation.sources, digest="edited"))
    assert not keep_program(graph_cache, traced(), CASE)
    assert not graph_cache.folder.exists()


def test_a_graph_with_no_form_as_data_is_not_kept(graph_cache: GraphCache) -> None:
    program = traced()
    assert not keep_program(graph_cache, replace(program, module=torch.fx.symbolic_trace(torch.nn.Linear(2, 2))), CASE)
    assert not graph_cache.folder.exists()


@pytest.mark.slow
def test_every_plain_graph_of_the_cases_comes_back(tmp_path: Path) -> None:
    from bitproof.builtin_cases import all_cases

    for case in map(small, [c for c in all_cases() if "graph" in (c.reference, c.candidate)]):
        kept_at = graph_cache_of(case, tmp_path, installed())
        if kept_at is None or case.requires is not None:
            continue
        program = prepare(traced_part(case), torch.device("cpu"))
        assert keep_program(kept_at, program, case), case.name
        found = read_program(kept_at)
        assert found is not None and found.code_hash == program.code_hash, case.name
