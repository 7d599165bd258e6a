"""Calls for every operator of torch's own: what its own samples run, what resembles them, and what schemas allow."""

from __future__ import annotations

import importlib
import random
import sys
import types
import unittest
from collections.abc import Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from bitproof.harness.graph.operators import written_names
from bitproof.harness.powers.proofs.prover.graphs.admitted import mixtures_of
from bitproof.harness.torch_compat import OpOverload
from tests.harness.powers.proofs.scan_variants import Arguments, by_name, tensors_of

NAMESPACES = ("aten", "prims")
MOST_CALLS = 8
MOST_ELEMENTS = 20_000


def operators() -> list[OpOverload]:
    """Every overload of these namespaces of which a proof may take a call, by name, and those that Inductor adds."""
    importlib.import_module("torch._inductor.inductor_prims")
    found = {}
    for full in torch._C._dispatch_get_all_op_names():
        namespace, _, rest = full.partition("::")
        name, _, overload = rest.partition(".")
        if namespace in NAMESPACES:
            packet = getattr(getattr(torch.ops, namespace), name, None)
            op = getattr(packet, overload or "default", None)
            if isinstance(op, OpOverload) and not is_refused_by_form(op):
                found[str(op)] = op
    return [found[name] for name in sorted(found)]


def is_refused_by_form(op: OpOverload) -> bool:
    """Whether a proof refuses every call of an operator: it says that it writes something else than a first `self`, or
    is not named as one that does."""
    return written_names(op) not in ((), ("self",)) or (bool(written_names(op)) and not op._opname.endswith("_"))


def stem(op: OpOverload) -> str:
    """What an operator has in common with its forms: in place, copying, native, of another namespace."""
    name = op._schema.name.split("::")[1].strip("_").removesuffix("_copy")
    return name.removeprefix("native_").removeprefix("foreach_").strip("_")


class Recorder(TorchDispatchMode):
    """Keeps the calls that are made under it: of each operator as many as are worth trying, of unlike form."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, list[Arguments]] = {}
        self._forms: set[Any] = set()

    def keep(self, op: OpOverload, args: Arguments) -> None:
        """Note a call, unless one of its form is noted, or many are."""
        found = self.calls.setdefault(str(op), [])
        tensors = tensors_of(args)
        form = str(op), tuple((x.dtype, x.dim()) for x in tensors), _scalars(args)
        if len(found) >= MOST_CALLS or form in self._forms or any(x.numel() > MOST_ELEMENTS for x in tensors):
            return
        if any(type(x) is not Tensor or x.layout != torch.strided or x.device.type != "cpu" for x in tensors):
            return
        self._forms.add(form)
        found.append(pytree.tree_map_only(Tensor, lambda x: x.detach().clone(), args))

    def __torch_dispatch__(self, op: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.keep(op, (args, kwargs or {}))
        return op(*args, **(kwargs or {}))


def _scalars(args: Arguments) -> str:
    return str([x for x in pytree.tree_leaves(args) if isinstance(x, (bool, str, type(None)))])


def recorded(
    samples: int, dtypes: Sequence[torch.dtype] = (torch.float32, torch.int64, torch.bool)
) -> dict[str, list[Arguments]]:
    """The calls that torch's own samples of operators make, forward and backward, and those calls as they stand."""
    sys.modules.setdefault("expecttest", types.SimpleNamespace(TestCase=unittest.TestCase))  # type: ignore[arg-type]
    from torch.testing._internal.common_methods_invocations import op_db

    recorder = Recorder()
    for info in op_db:
        for dtype in dtypes:
            if dtype not in info.dtypes:
                continue
            real = dtype.is_floating_point
            try:
                found = [*islice(info.sample_inputs("cpu", dtype, requires_grad=real and info.supports_autograd), 100)]
                random.Random(info.name).shuffle(found)  # the first ones are of scalars
                for sample in found[: samples if real else 4]:
                    _record(recorder, info, sample, backward=real)
            except Exception:  # a sample that cannot be made here
                continue
    return recorder.calls


def _record(recorder: Recorder, info: Any, sample: Any, *, backward: bool) -> None:
    try:
        with recorder:
            found = info(sample.input, *sample.args, **sample.kwargs)
            results = [x for x in pytree.tree_leaves(found) if isinstance(x, Tensor) and x.requires_grad]
            if backward and results:
                torch.autograd.backward(results, [torch.randn_like(x) for x in results])
    except Exception:
        pass
    name = getattr(info, "aten_name", None) or info.name.split(".")[-1]
    packet = getattr(torch.ops.aten, name, None)
    with torch.no_grad():
        for overload in packet.overloads() if packet is not None else ():
            args = (sample.input, *sample.args), sample.kwargs
            recorder.keep(getattr(packet, overload), args)


def calls_of(op: OpOverload, known: dict[str, list[Arguments]], stems: dict[str, list[Arguments]]) -> list[Arguments]:
    """An operator's calls: recorded ones, those of other forms of it, and some that its schema allows; that run."""
    own = known.get(str(op), [])
    own = sorted(own, key=lambda args: -max((x.dim() for x in tensors_of(args)), default=0))
    chance = random.Random(str(op))
    found = _that_run(op, own, MOST_CALLS)
    if len(found) < MOST_CALLS:
        found += _that_run(op, stems.get(stem(op), []), MOST_CALLS - len(found))
    if len(found) < 6:
        found += _that_run(op, (of_schema(op, chance) for _ in range(400)), 6 - len(found))
    return found


def that_mix(op: OpOverload, known: dict[str, list[Arguments]], mixture: str) -> list[Arguments]:
    """An operator's recorded calls that mix dtypes so."""
    return [args for args in known.get(str(op), []) if mixture in mixtures_of(str(op), by_name(op, args))]


def _that_run(op: OpOverload, calls: Any, at_most: int) -> list[Arguments]:
    found: list[Arguments] = []
    with torch.no_grad():
        for args in calls:
            if len(found) >= at_most:
                break
            try:
                own = pytree.tree_map_only(Tensor, lambda x: x.detach().clone(), args)
                op(*own[0], **own[1])
            except Exception:
                continue
            found.append(args)
    return found


# -- calls that a schema allows -----------------------------------------------------------------------

PER_CHANNEL = ("weight", "bias", "running_mean", "running_var", "running", "save_mean", "save_invstd", "mean", "invstd")
INDICES = ("index", "indices", "offsets", "lengths", "boundaries", "target", "ind", "offs")


def of_schema(op: OpOverload, chance: random.Random) -> Arguments:
    """Arguments of the right types, of shapes that go together more often than not."""
    channels, dims = chance.choice([2, 3, 4]), chance.choice([1, 2, 2, 3, 4, 4, 5])
    square = chance.random() < 0.4
    shape = [channels] * dims if square else [2, channels, 4, 4, 4][:dims]
    palette = {
        "shape": shape,
        "channels": channels,
        "dtype": chance.choice([torch.float32, torch.float32, torch.float32, torch.int64, torch.bool]),
    }
    args: dict[str, Any] = {}
    for argument in op._schema.arguments:
        if argument.has_default_value() and chance.random() < 0.6:
            continue
        args[argument.name] = _value(argument.name, str(argument.type), palette, chance)
    return (), args


def _value(name: str, kind: str, palette: dict[str, Any], chance: random.Random) -> Any:
    if kind.startswith("Optional["):
        return None if chance.random() < 0.4 else _value(name, kind[9:-1], palette, chance)
    if kind == "List[Tensor]" or kind.startswith("List[Optional[Tensor"):
        return [_tensor(name, palette, chance) for _ in range(chance.choice([1, 2, 2, 3]))]
    if kind.startswith("List["):
        inner = kind[5:-1]
        if "dim" not in name and inner in ("int", "SymInt") and chance.random() < 0.4:
            return list(palette["shape"])
        count = chance.choice([1, 2, 2, 3, len(palette["shape"])])
        return [_value(name, inner, palette, chance) for _ in range(count)]
    match kind:
        case "Tensor":
            return _tensor(name, palette, chance)
        case "bool":
            return chance.random() < 0.5
        case "int" | "SymInt":
            if "dim" in name:
                return chance.choice([0, 1, -1])
            if name == "reduction":
                return chance.choice([0, 1, 2])
            if "dtype" in name:
                return palette["dtype"]
            return chance.choice([0, 1, 1, 2, 2, 3, 4])
        case "float":
            return chance.choice([0.0, 0.1, 0.5, 1.0, 1e-5])
        case "number" | "Scalar":
            return chance.choice([0, 1, 2, 0.5, 1.5])
        case "str":
            return chance.choice(["mean", "sum", "none", "reflect", "constant", "linear", "trunc", "floor", "amax"])
        case "ScalarType":
            return palette["dtype"]
        case "Device":
            return torch.device("cpu")
        case "Layout":
            return torch.strided
        case "MemoryFormat":
            return chance.choice([torch.contiguous_format, torch.preserve_format])
    return None


def _tensor(name: str, palette: dict[str, Any], chance: random.Random) -> Tensor:
    shape, dtype = palette["shape"], palette["dtype"]
    if any(name == part or name.endswith("_" + part) for part in PER_CHANNEL) and chance.random() < 0.7:
        return torch.rand(palette["channels"]) + 0.5
    if any(part in name for part in INDICES) and chance.random() < 0.85:
        return torch.randint(0, 2, shape[: chance.choice([1, len(shape)])])
    if "mask" in name and chance.random() < 0.8:
        return torch.rand(shape) < 0.5
    roll = chance.random()
    if roll < 0.1:
        shape = []
    elif roll < 0.25:
        shape = shape[-1:]
    x = torch.randn(shape)
    return x.to(dtype) if dtype is not torch.int64 else (x.abs() * 2).to(dtype)


def by_stem(known: dict[str, list[Arguments]], ops: list[OpOverload]) -> dict[str, list[Arguments]]:
    """The recorded calls of all forms of an operator."""
    found: dict[str, list[Arguments]] = {}
    for op in ops:
        found.setdefault(stem(op), []).extend(known.get(str(op), []))
    return found
