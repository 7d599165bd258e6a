"""The table of operators, held to what torch has and to what its operators do."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import importlib
import json
import os
import signal
import sys
from typing import Any

import pytest
import torch

import bitproof.harness.graph.offload_operators  # noqa: F401 (it registers bitproof's own)
from bitproof.harness.operators import ROWS, RowFlow, Uninitialized
from bitproof.harness.torch_operators import schema_of

WRITTEN_IN_FULL = {
    "aten._copy_from_and_resize": "copies into all of what it resizes",
    "aten.resize_as_sparse": "adds no elements: a sparse tensor has none where nobody put any",
    "aten.resize_as_sparse_": "as above",
    "aten.sparse_resize": "as above",
    "aten.sparse_resize_": "as above",
    "aten.sparse_resize_and_clear": "as above",
    "aten.sparse_resize_and_clear_": "as above",
}


def schemas() -> list[Any]:
    return [schema for schema in torch._C._jit_get_all_schemas() if schema.name.startswith(("aten::", "prims::"))]


def test_every_operator_that_is_called_empty_or_resize_is_in_the_table() -> None:
    names = {schema.name.replace("::", ".") for schema in schemas()}
    named = {name for name in names if "empty" in name or "resize" in name}
    in_table = {row.name for row in ROWS.values() if row.uninitialized}
    assert named - in_table - WRITTEN_IN_FULL.keys() == set()
    assert len(named) > 15, "torch names them so"


def test_rows_name_operators_that_there_are_and_arguments_that_these_have() -> None:
    for module in ("torch._functorch._activation_offloading.offload_ops", "torch._dynamo.variables.streams"):
        with contextlib.suppress(ImportError):  # some releases have other modules
            importlib.import_module(module)
    for row in ROWS.values():
        namespace, _, name = row.name.partition(".")
        if name == "*" or namespace in ("torch", "_operator", "higher_order"):
            continue
        packet = getattr(getattr(torch.ops, namespace), name, None)
        if packet is None:
            assert namespace in ("_c10d_functional", "prims", "ao", "streams") or row.reads_layout, (
                f"{row.name} is in no release"
            )
            continue
        declared = {x.name for overload in packet.overloads() for x in schema_of(getattr(packet, overload)).arguments}
        asked = {row.returns, row.writes, row.wait and row.wait.argument, row.frees} - {None}
        assert asked <= declared, row.name


def test_overloads_that_rows_name_are_in_torch() -> None:
    for row in ROWS.values():
        named = {*row.allowed, *row.checks, *(x for x in (row.rearranges, row.exact, row.measures) if x is not None)}
        if named and row.name.startswith("aten."):
            assert named <= {*getattr(torch.ops.aten, row.name.removeprefix("aten.")).overloads()}, row.name
        assert row.in_place_of is None or ROWS[row.in_place_of].exact


def test_what_makes_values_of_none_is_constant_whatever_it_takes_its_shape_from() -> None:
    made = ("zeros", "ones", "full", "zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full")
    assert [name for name in made if not ROWS[f"aten.{name}"].is_constant] == []
    assert not ROWS["aten.rand_like"].is_constant


def test_rows_pass_through_what_makes_random_numbers_in_the_shape_of_another() -> None:
    like = {row.rows for name, row in ROWS.items() if name.startswith("aten.rand") and name.endswith("_like")}
    assert like == {RowFlow.ELEMENTWISE}


# -- what operators do, whatever they are called ---------------------------------------------------------

SIDE = 32
_M_PERTURB = -6
INPUTS: list[tuple[str, tuple[int, ...], int, list[int]]] = [
    ("real", (SIDE, SIDE), 1, [SIDE, SIDE]),
    ("real", (SIDE, SIDE), 0, [0]),
    ("real", (SIDE * SIDE,), 0, [SIDE * SIDE]),
    ("real", (2, 4, 8, SIDE), 1, [1, 1]),
    ("real", (16, 16), 40, [40, 40]),
    ("whole", (SIDE, SIDE), 0, [SIDE, SIDE]),
]
"""Tensors of what, of which shape; a number and a list of numbers for arguments that want these."""

PARTLY = {
    "aten._compute_linear_combination": "its coefficients are of no use here",
    "aten._pdist_backward": "distances of another number than there are pairs",
    "aten._weight_norm_interface": "norms in the shape of what it is handed, of which it writes a part",
    "aten._weight_norm_interface_backward": "as above",
    "aten.lstm": "states of no layer",
    "aten._reshape_alias": "shows memory behind the end of its argument's, where strides make no sense",
    "aten._reshape_alias_copy": "as above",
    "aten.fbgemm_pack_gemm_matrix_fp16": "a handle, whose bytes are an address",
    "aten.set_": "shows memory behind the end of a storage, which grows",
}
"""Operators that leave a part of a result unwritten where arguments make no sense."""


def _argument(argument: Any, kind: tuple[str, tuple[int, ...], int, list[int]]) -> Any:
    values, shape, number, numbers = kind
    generator = torch.Generator().manual_seed(3)

    def tensor() -> torch.Tensor:
        if values == "whole":
            return torch.randint(0, 3, shape, generator=generator)
        return torch.rand(*shape, generator=generator) * 0.8 + 0.1

    match str(argument.type):
        case "Tensor":
            return tensor()
        case "List[Tensor]":
            return [tensor(), tensor()]
        case "int" | "SymInt":
            return number
        case "List[int]" | "List[SymInt]":
            return [*range(len(numbers))] if argument.name == "physical_layout" else numbers
        case "float":
            return 0.5
        case "number":
            return 1
        case "bool":
            return False
        case "Device":
            return torch.device("cpu")
        case other if other.startswith("Optional"):
            return None
    raise TypeError(argument.type)


def _bytes_of(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().contiguous().view(-1).view(torch.uint8).tolist() if value.numel() else []
    return [_bytes_of(x) for x in value] if isinstance(value, (list, tuple)) else None


def _leaves_unwritten(operator: Any, perturb: Any) -> bool | None:
    """Whether a result depends on what fresh memory held; None where no arguments fit."""
    ran = False
    for kind in INPUTS:
        found = []
        try:
            for pattern in (0x11, 0x22):
                perturb(pattern)
                torch.manual_seed(0)
                arguments = [x for x in schema_of(operator).arguments if not x.has_default_value()]
                given = {x.name: _argument(x, kind) for x in arguments}
                found.append(
                    _bytes_of(
                        operator(*given.values()) if not any(x.kwarg_only for x in arguments) else operator(**given)
                    )
                )
        except Exception:
            continue
        finally:
            perturb(0)
        ran = True
        if found[0] != found[1]:
            return True
    return False if ran else None


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="fresh memory can be filled by glibc alone")
def test_what_gives_memory_that_nobody_wrote_is_in_the_table_whatever_it_is_called() -> None:
    """Each operator runs twice, over fresh memory of two patterns, in a process of its own, as some of them crash."""
    importlib.import_module("torch._inductor.inductor_prims")  # other tests may have, and it adds operators
    ran, unwritten = set(), set()
    for schema in schemas():
        namespace, name = schema.name.split("::")
        if schema.overload_name.startswith("out") or any(x.is_out for x in schema.arguments) or "seed" in name:
            continue
        operator = getattr(getattr(getattr(torch.ops, namespace), name), schema.overload_name or "default", None)
        if operator is None:
            continue
        reader, writer = os.pipe()
        if (child := os.fork()) == 0:
            faulthandler.disable()  # pytest would have it tell of every crash
            signal.alarm(20)
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno() if sys.stdout.fileno() > 2 else 1)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            libc = ctypes.CDLL(None)
            answer = _leaves_unwritten(operator, lambda pattern: libc.mallopt(_M_PERTURB, pattern))
            os.write(writer, json.dumps(answer).encode())
            os._exit(0)
        os.close(writer)
        with open(reader) as pipe:
            answer = json.loads(pipe.read() or "null")
        os.waitpid(child, 0)
        if answer is not None:
            ran.add(f"{namespace}.{name}")
        if answer:
            unwritten.add(f"{namespace}.{name}")
    print(f"{len(ran)} operators ran, {len(unwritten)} of them left memory as it was: {sorted(unwritten)}")
    in_table = {row.name for row in ROWS.values() if row.uninitialized}
    assert len(ran) > 500
    assert unwritten - in_table - PARTLY.keys() == set()
    assert {"aten.empty_permuted", "aten.empty_like", "aten.resize_"} <= unwritten
    assert {row.name for row in ROWS.values() if row.uninitialized is Uninitialized.WHOLE} & unwritten
