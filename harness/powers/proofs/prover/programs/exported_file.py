"""Reads a program saved by torch.export, without running anything in the file.

torch.export.load is only for trusted files: it imports modules that the file names, evaluates expressions, and
unpickles. Here the zip and the JSON are read field by field, and unknown fields are refused. Operators are looked up by
name among torch's own. Tensors must not reach outside the bytes of the file.

Files of torch 2.11 and later can be read (schema version 8).
"""

from __future__ import annotations

import keyword
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export.graph_signature import ConstantArgument, InputKind, InputSpec, OutputKind, OutputSpec, TensorArgument
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from bitproof.harness.errors import UsageError
from bitproof.harness.files.plain_files import read_plain
from bitproof.harness.powers.proofs.prover.graphs.export import RefusedError
from bitproof.harness.powers.proofs.prover.layouts import line_of
from bitproof.harness.powers.proofs.prover.programs import sample_inputs
from bitproof.harness.powers.proofs.prover.programs.json_fields import Field, FieldError, field_of
from bitproof.harness.powers.proofs.prover.programs.plain_archive import ArchiveError, files_of
from bitproof.harness.powers.proofs.prover.programs.plain_tensors import (
    DTYPES,
    TensorError,
    memory_of,
    refuse_layout,
    with_layout,
)
from bitproof.harness.powers.proofs.prover.programs.size_expressions import (
    ExpressionError,
    OpenSizesOfFile,
    check_expression,
)
from bitproof.harness.torch_compat import FakeTensorMode, OpOverload, flattened
from bitproof.harness.torch_operators import schema_of

LARGEST = (1 << 32) - 1
"""The maximum size of a file in bytes. Larger archives write sizes in a second form, zip64."""

LARGEST_MODEL = 1 << 27
"""The maximum size of the model's JSON in bytes, about 80,000 calls."""

SCHEMA = 8
"""The supported major version of torch's schema (torch/_export/serde/schema.py)."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,999}")
_PATH = re.compile(r"\w{1,200}(\.\w{1,200}){0,50}", re.ASCII)
# Only torch's own operators: a custom operator could run any code.
_OPERATOR = re.compile(r"torch\.(?:_ops|ops)\.(aten|prims)\.([A-Za-z_]\w{0,99})\.([A-Za-z_]\w{0,99})", re.ASCII)
_IGNORED = re.compile(r"\.data/(serialization_id|version)|\.format_version|\.storage_alignment|extra/.+")
_FIX = "save it with torch.export.save of torch 2.11 or later, or load your own file and pass it to bitproof.prove"

# Keys are numbers of torch's schema. Sparse layouts are left out, since proofs need plain memory.
_LAYOUTS = {7: torch.strided}
_MEMORY_FORMATS = {
    1: torch.contiguous_format,
    2: torch.channels_last,
    3: torch.channels_last_3d,
    4: torch.preserve_format,
}
_DEVICES = ("cpu", "cuda", "meta", "xpu", "mps", "mtia", "hpu")
_ON_NUMBERS: Mapping[str, Callable[..., Any]] = {
    **{f"_operator.{name}": getattr(operator, name) for name in ("add", "sub", "mul", "neg", "mod", "pow")},
    **{f"_operator.{name}": getattr(operator, name) for name in ("floordiv", "truediv", "and_", "or_")},
    **{f"_operator.{name}": getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    **{f"torch.{name}": getattr(torch, name) for name in ("sym_max", "sym_min", "sym_int", "sym_float", "sym_not")},
    **{f"torch.fx.experimental.sym_node.{name}": getattr(torch, name) for name in ("sym_max", "sym_min")},
    "math.trunc": math.trunc,
}
"""Functions on sizes, by their names in the file."""


@dataclass(frozen=True)
class _Signature:
    input_specs: Sequence[InputSpec]
    output_specs: Sequence[OutputSpec]


@dataclass(frozen=True)
class SavedProgram:
    """The parts of an exported program that a proof reads, named as in torch's ExportedProgram."""

    graph_module: GraphModule
    graph_signature: _Signature
    state_dict: Mapping[str, Tensor]
    constants: Mapping[str, Tensor]
    example_inputs: Any
    returns: str
    """How the outputs are nested, as text from the file. It is only compared, never parsed."""


def read_exported(file: Path) -> SavedProgram:
    """Read a program from a file that torch.export.save wrote.

    Raises UsageError if the file is damaged or not an exported program, and RefusedError if a proof does not support
    it.
    """
    try:
        return _Reader(files_of(read_plain(file, LARGEST))).read()
    except OSError as error:
        raise _refused(file, str(error.strerror or error)) from None
    except (ArchiveError, ExpressionError, FieldError, TensorError, sample_inputs.SampleError) as error:
        raise _refused(file, str(error)) from error
    except (UsageError, RefusedError):
        raise
    except Exception as error:  # torch raises many kinds of errors for an invalid graph or size
        reason = str(error).splitlines()[0] if str(error) else ""
        raise _refused(file, f"{type(error).__name__}: {reason}") from error


def _refused(file: Path, what: str) -> UsageError:
    return UsageError(
        f"{file} cannot be proved: {what}",
        expected="a file that torch.export.save wrote, of tensors and operators alone",
        found=what,
        fix=_FIX,
    )


class _Reader:
    def __init__(self, files: Mapping[str, memoryview]) -> None:
        roots = {name.partition("/")[0] for name in files}
        # torch.export.save puts all files into a single folder.
        if len(roots) != 1:
            raise ArchiveError(f"it has {len(roots)} folders at its top, not one")
        self.files = {name.partition("/")[2]: data for name, data in files.items()}
        self.shape_env = ShapeEnv()
        self.graph = Graph()
        self.values: dict[str, Node] = {}
        self.memories: dict[str, Tensor] = {}

    def read(self) -> SavedProgram:
        self._expect("archive_format", b"pt2")
        self._expect("archive_version", b"0")
        self._expect("byteorder", b"little")
        models = [name for name in self.files if name.startswith("models/")]
        if len(models) != 1 or not re.fullmatch(r"models/[\w-]+\.json", models[0], re.ASCII):
            raise ArchiveError(f"it has {len(models)} programs, not one: {', '.join(models[:3])}")
        name = models[0].removeprefix("models/").removesuffix(".json")
        known = {"archive_format", "archive_version", "byteorder", models[0]}
        state = self._tensors("weights", "weight_", name, known)
        constants = self._tensors("constants", "tensor_", name, known)
        samples = f"data/sample_inputs/{name}.pt"
        known.add(samples)
        # An unknown file may change the program in a newer torch, so ignoring it would not be safe.
        if others := [x for x in self.files if x not in known and not _IGNORED.fullmatch(x)]:
            raise ArchiveError(f"it holds {others[0]}, which is no tensor")
        model = field_of(self._file(models[0], LARGEST_MODEL), "model")
        parts = model.object(
            ("graph_module", "opset_version", "range_constraints", "schema_version"),
            ("verifiers", "torch_version", "guards_code"),
        )
        version = parts["schema_version"].object(("major", "minor"))
        if version["major"].integer() != SCHEMA or version["minor"].integer() < 0:
            raise version["major"].wrong(f"{SCHEMA}, as torch 2.11 and later write")
        program = parts["graph_module"].object(
            ("graph", "signature", "module_call_graph"), ("metadata", "treespec_namedtuple_fields")
        )
        with FakeTensorMode(shape_env=self.shape_env), self.shape_env.ignore_fresh_unbacked_symbols():
            inputs = self._graph(program["graph"], parts["range_constraints"])
        signature = self._signature(program["signature"])
        module = GraphModule(nn.Module(), self.graph)
        found = SavedProgram(
            module,
            signature,
            state,
            constants,
            self._samples(samples, signature, inputs),
            _returns(program["module_call_graph"]),
        )
        _check_state(found, inputs)
        return found

    # -- files ------------------------------------------------------------------------------------

    def _expect(self, name: str, content: bytes) -> None:
        if (found := bytes(self._file(name, 100))) != content:
            raise ArchiveError(f"its {name} is {found[:40]!r}, not {content!r}")

    def _file(self, name: str, most: int) -> memoryview:
        if name not in self.files:
            raise ArchiveError(f"it has no {name}")
        if len(self.files[name]) > most:
            raise ArchiveError(f"its {name} has {len(self.files[name])} bytes, more than {most}")
        return self.files[name]

    def _tensors(self, kind: str, prefix: str, model: str, known: set[str]) -> dict[str, Tensor]:
        config = f"data/{kind}/{model}_{kind}_config.json"
        known.add(config)
        if f"data/{kind}/{model}.pt" in self.files:
            raise ArchiveError(f"it holds data/{kind}/{model}.pt, written by an older torch as a pickle")
        found = {}
        for name, payload in field_of(self._file(config, LARGEST_MODEL), kind).object(("config",))["config"].items():
            if not _PATH.fullmatch(name):
                raise payload.wrong("a name of plain identifiers and numbers, joined by points")
            facts = payload.object(("path_name", "is_param", "use_pickle", "tensor_meta"))
            path = facts["path_name"].text()
            # A pickle could run code when it is loaded.
            if facts["use_pickle"].truth():
                raise payload.wrong(f"a plain tensor; the file has {name} as a pickle")
            if not re.fullmatch(prefix + r"\d{1,9}", path, re.ASCII):
                raise facts["path_name"].wrong(f"{prefix} and a number: {path[:60]} is an object of a class")
            path = f"data/{kind}/{path}"
            known.add(path)
            meta = facts["tensor_meta"].object(_META)
            dtype, device = _dtype(meta["dtype"]), _device(meta["device"])
            sizes, strides = ([_closed(x) for x in meta[part].list()] for part in ("sizes", "strides"))
            # Before memory is allocated: the sizes come from the file, and may be any numbers.
            refuse_layout(sizes, strides, offset := _closed(meta["storage_offset"]), payload.path)
            tensor = with_layout(self._memory(path, dtype, device, payload), sizes, strides, offset, payload.path)
            requires_grad = meta["requires_grad"].truth()
            if requires_grad and not (dtype.is_floating_point or dtype.is_complex):
                raise meta["requires_grad"].wrong("false, as integers have no gradients")
            is_parameter = facts["is_param"].truth()
            found[name] = nn.Parameter(tensor, requires_grad=requires_grad) if is_parameter else tensor
        return found

    def _memory(self, path: str, dtype: torch.dtype, device: torch.device, payload: Field) -> Tensor:
        # Tensors of one file must share memory, as when they were saved: an in-place write to one then shows in the
        # others.
        memory = self.memories.get(path)
        if memory is None:
            memory = memory_of(self._file(path, LARGEST), dtype, path)
            self.memories[path] = memory = _on_device(memory, device, payload)
        if memory.dtype != dtype or memory.device.type != device.type:
            raise payload.wrong("one dtype and device for all tensors of one file")
        return memory

    def _samples(self, file: str, signature: _Signature, inputs: Sequence[Any]) -> Any:
        if not self._file(file, LARGEST):
            return None
        leaves = flattened(sample_inputs.read(self.files[file]))[0]
        users = [x for spec, x in zip(signature.input_specs, inputs, strict=True) if spec.kind is InputKind.USER_INPUT]
        if len(leaves) != len(users):
            raise sample_inputs.SampleError(f"it has {len(leaves)} sample inputs for {len(users)} inputs")
        for place, (leaf, like) in enumerate(zip(leaves, users, strict=True)):
            if isinstance(leaf, Tensor) != isinstance(like, Tensor) or (
                isinstance(leaf, Tensor) and not _fits(leaf, like)
            ):
                raise sample_inputs.SampleError(f"sample input {place} does not fit input {place} of the program")
        return [
            _on_device(x, y.device, None) if isinstance(x, Tensor) else x for x, y in zip(leaves, users, strict=True)
        ]

    # -- the graph --------------------------------------------------------------------------------

    def _graph(self, graph: Field, ranges: Field) -> list[Any]:
        parts = graph.object(
            ("inputs", "outputs", "nodes", "tensor_values", "sym_int_values", "sym_bool_values"),
            ("is_single_tensor_return", "custom_obj_values", "sym_float_values"),
        )
        if parts["is_single_tensor_return"].value not in (None, False):
            raise parts["is_single_tensor_return"].wrong("false")
        # Every size of the file is checked, also those that are not used.
        sizes = OpenSizesOfFile(self.shape_env, ranges)
        numbers = dict(parts["sym_int_values"].items())
        for values in (numbers, *(dict(parts[f"sym_{kind}_values"].items()) for kind in ("bool", "float"))):
            for number in values.values():
                _check_number(number)
        metas = {name: meta.object(_META) for name, meta in parts["tensor_values"].items()}
        for meta in metas.values():
            for size in (*meta["sizes"].list(), *meta["strides"].list(), meta["storage_offset"]):
                _check_number(size)
        inputs: list[Any] = []
        # Inputs first: calls may only refer to values that are defined before them.
        for argument in parts["inputs"].list():
            kind, content = argument.one_of(_INPUTS)
            value: Any
            if kind == "as_tensor":
                name = _identifier(content.object(("name",))["name"])
                value = _fake(sizes, metas.get(name), content)
            elif kind == "as_sym_int":
                name = _identifier(content.object(("as_name",))["as_name"])
                if name not in numbers:
                    raise content.wrong("an input with a size among the graph's sizes")
                value = sizes.size(numbers[name])
            else:
                name, value = f"constant_input_{len(inputs)}", _constant(kind, content)
            self._define(name, node := self.graph.placeholder(name), argument)
            node.meta["val"] = value
            inputs.append(value)
        for call in parts["nodes"].list():
            self._call(call)
        self.graph.output(tuple(self._argument(x) for x in parts["outputs"].list()))
        return inputs

    def _define(self, name: str, node: Node, field: Field) -> None:
        if name in self.values:
            raise field.wrong(f"each value once: {name} is there twice")
        self.values[name] = node

    def _named(self, field: Field, part: str = "name") -> Node:
        name = _identifier(field.object((part,))[part])
        if name not in self.values:
            raise field.wrong(f"a value that was computed before, which {name} was not")
        return self.values[name]

    def _call(self, field: Field) -> None:
        parts = field.object(("target", "inputs", "outputs", "metadata"), ("is_hop_single_tensor_return", "name"))
        target = _target(parts["target"])
        name = None if parts["name"].value is None else _identifier(parts["name"])
        args, kwargs = self._arguments(target, parts["inputs"])
        node = self.graph.create_node("call_function", target, args, kwargs, name)
        outputs = [output.one_of(_OUTPUTS) for output in parts["outputs"].list()]
        returns = [str(x.type) for x in schema_of(target).returns] if isinstance(target, OpOverload) else ["number"]
        # An operator without results may have one output, of kind `as_none`.
        if len(outputs) != len(returns) and not (not returns and [kind for kind, _ in outputs] == ["as_none"]):
            raise parts["outputs"].wrong(f"{len(returns)}, as {target} returns")
        # A list among the results is one value in the schema, but torch names its items: they become `getitem` calls.
        for place, ((kind, content), declared) in enumerate(zip(outputs, returns, strict=False)):
            if (kind in ("as_tensors", "as_sym_ints")) != ("[]" in declared or "List[" in declared):
                raise content.wrong(f"a {declared}, as {target} returns")
            one = node if len(outputs) == 1 else self.graph.call_function(operator.getitem, (node, place))
            if kind in ("as_tensors", "as_sym_ints"):
                for i, item in enumerate(content.list()):
                    own = item.object(("name" if kind == "as_tensors" else "as_name",)).popitem()[1]
                    part = self.graph.call_function(operator.getitem, (one, i))
                    self._define(_identifier(own), part, content)
            elif kind != "as_none":
                own = content.object(("name" if kind == "as_tensor" else "as_name",)).popitem()[1]
                self._define(_identifier(own), one, content)

    def _arguments(self, target: Any, field: Field) -> tuple[tuple[Any, ...], dict[str, Any]]:
        given = []
        for argument in field.list():
            parts = argument.object(("name", "arg"), ("kind",))
            kind = parts["kind"].value if parts["kind"].value in (None, 1, 2) else parts["kind"].integer()
            if kind not in (None, 1, 2):
                raise parts["kind"].wrong("1 by position or 2 by name")
            given.append((parts["name"].text(), kind, self._argument(parts["arg"]), argument))
        if not isinstance(target, OpOverload):
            return tuple(value for _, _, value, _ in given), {}
        schema = schema_of(target).arguments
        places = {x.name: place for place, x in enumerate(schema)}
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for name, kind, value, argument in given:
            # The first `len(args)` arguments were passed by position.
            if name not in places or name in kwargs or places[name] < len(args):
                raise argument.wrong(f"each argument of {target} once, by its name: {', '.join(places)}")
            declared = schema[places[name]]
            # A file may leave out how an argument was passed. Then those with a default value count as named.
            by_position = kind == 1 if kind else not (declared.kwarg_only or declared.has_default_value())
            if by_position:
                if kwargs or places[name] != len(args) or declared.kwarg_only:
                    raise argument.wrong(f"the order of {target}: {', '.join(places)}")
                args.append(value)
            else:
                kwargs[name] = value
        return tuple(args), kwargs

    def _argument(self, field: Field) -> Any:
        kind, content = field.one_of(_ARGUMENTS)
        match kind:
            case "as_tensor":
                return self._named(content)
            case "as_tensors":
                return [self._named(x) for x in content.list()]
            case "as_nested_tensors":
                return [[self._named(x) for x in own.list()] for own in content.list()]
            case "as_optional_tensor":
                return self._optional(content)
            case "as_optional_tensors":
                return [self._optional(x) for x in content.list()]
            case "as_sym_int" | "as_sym_float" | "as_sym_bool":
                return self._number(content, kind.removeprefix("as_sym_"))
            case "as_sym_ints" | "as_sym_floats" | "as_sym_bools":
                return [self._number(x, kind.removeprefix("as_sym_").removesuffix("s")) for x in content.list()]
            case "as_graph" | "as_custom_obj" | "as_operator" | "as_string_to_argument":
                raise _unproved("an argument that is a nested graph, an object or a function", content)
        return _constant(kind, content)

    def _optional(self, field: Field) -> Node | None:
        kind, content = field.one_of(("as_tensor", "as_none"))
        return self._named(content) if kind == "as_tensor" else None

    def _number(self, field: Field, kind: str) -> Any:
        form, content = field.one_of(("as_name", f"as_{kind}"))
        return self._named(field, "as_name") if form == "as_name" else _constant(form, content)

    # -- the signature ----------------------------------------------------------------------------

    def _signature(self, field: Field) -> _Signature:
        parts = field.object(("input_specs", "output_specs"))
        nodes = self.graph.find_nodes(op="placeholder")
        specs, returned = parts["input_specs"].list(), self.graph.output_node().args[0]
        assert isinstance(returned, tuple)
        # The signature repeats the graph's inputs and outputs. A difference would give them another meaning.
        if len(specs) != len(nodes):
            raise parts["input_specs"].wrong(f"{len(nodes)}, as the graph has inputs")
        inputs = [self._input(spec, node) for spec, node in zip(specs, nodes, strict=True)]
        results = parts["output_specs"].list()
        if len(results) != len(returned):
            raise parts["output_specs"].wrong(f"{len(returned)}, as the graph has outputs")
        names = {kind: [x.target for x in inputs if x.kind is kind] for kind in InputKind}
        users = [x.arg.name for x in inputs if x.kind is InputKind.USER_INPUT]
        for own_kind, held in names.items():
            if own_kind is not InputKind.USER_INPUT and len({*held}) != len(held):
                raise parts["input_specs"].wrong("each parameter, buffer and constant once")
        outputs = []
        for spec, value in zip(results, returned, strict=True):
            kind, own = spec.one_of(_RESULTS)
            result, target, among = _RESULTS[kind]
            if result is None:
                raise _unproved(f"an output of kind {kind}", own)
            facts = own.object(("arg", target) if target else ("arg",))
            found = self._argument(facts["arg"]) if kind == "user_output" else self._named(facts["arg"])
            # Nodes are compared by identity, and constants by value.
            if found is not value and (isinstance(found, Node) or found != value):
                raise spec.wrong("the output that the graph returns at this place")
            of = facts[target].text() if target else None
            if target and of not in (users if among is None else names[among]):
                raise spec.wrong(f"an output of one of the program's inputs: {of} is none")
            outputs.append(OutputSpec(result, ConstantArgument(name="", value=None), of))
        return _Signature(inputs, outputs)

    def _input(self, field: Field, node: Node) -> InputSpec:
        spec, own = field.one_of(_SPECS)
        kind, target = _SPECS[spec]
        if kind is None:
            raise _unproved(f"an input of kind {spec}", own)
        if spec == "constant_input":
            facts = own.object(("name", "value"))
            value = _constant(*facts["value"].one_of(_CONSTANTS))
            if value != node.meta["val"]:
                raise own.wrong("the number that the graph has as this input")
            return InputSpec(kind, ConstantArgument(name=str(node.target), value=value), None)
        facts = own.object(("arg", *((target,) if target else ()), *(("persistent",) if spec == "buffer" else ())))
        if spec == "user_input":
            among, argument = facts["arg"].one_of(_INPUTS)
            named = among in ("as_tensor", "as_sym_int") and self._argument(facts["arg"])
            is_same = named is node if named else _constant(among, argument) == node.meta["val"]
        else:
            is_same = self._named(facts["arg"]) is node and isinstance(node.meta["val"], Tensor)
        if not is_same:
            raise field.wrong("the input that the graph has at this place")
        name = facts[target].text() if target else None
        if target and not _PATH.fullmatch(name or ""):
            raise facts[target].wrong("a name of plain identifiers and numbers, joined by points")
        persistent = facts["persistent"].truth() if spec == "buffer" else None
        return InputSpec(kind, TensorArgument(name=str(node.target)), name, persistent)


_META = ("dtype", "sizes", "requires_grad", "device", "strides", "storage_offset", "layout")
_CONSTANTS = ("as_none", "as_int", "as_float", "as_string", "as_bool")
_INPUTS = ("as_tensor", "as_sym_int", *_CONSTANTS)
_OUTPUTS = ("as_tensor", "as_tensors", "as_none", "as_sym_int", "as_sym_ints", "as_sym_bool", "as_sym_float")
_ARGUMENTS = (
    *("as_tensor", "as_tensors", "as_nested_tensors", "as_optional_tensor", "as_optional_tensors"),
    *("as_sym_int", "as_sym_ints", "as_sym_float", "as_sym_floats", "as_sym_bool", "as_sym_bools"),
    *("as_graph", "as_custom_obj", "as_operator", "as_string_to_argument"),
    *_CONSTANTS,
    *("as_ints", "as_floats", "as_strings", "as_bools", "as_int_lists", "as_float_lists", "as_complex"),
    *("as_scalar_type", "as_memory_format", "as_layout", "as_device"),
)
# For each kind of input: torch's kind, or None if it is refused, and the field with the input's name.
_SPECS = {
    "user_input": (InputKind.USER_INPUT, None),
    "parameter": (InputKind.PARAMETER, "parameter_name"),
    "buffer": (InputKind.BUFFER, "buffer_name"),
    "tensor_constant": (InputKind.CONSTANT_TENSOR, "tensor_constant_name"),
    "constant_input": (InputKind.USER_INPUT, None),
    "custom_obj": (None, None),
    "token": (None, None),
}
_RESULTS = {
    "user_output": (OutputKind.USER_OUTPUT, None, None),
    "loss_output": (OutputKind.LOSS_OUTPUT, None, None),
    "buffer_mutation": (OutputKind.BUFFER_MUTATION, "buffer_name", InputKind.BUFFER),
    "parameter_mutation": (OutputKind.PARAMETER_MUTATION, "parameter_name", InputKind.PARAMETER),
    "user_input_mutation": (OutputKind.USER_INPUT_MUTATION, "user_input_name", None),
    "gradient_to_parameter": (OutputKind.GRADIENT_TO_PARAMETER, "parameter_name", InputKind.PARAMETER),
    "gradient_to_user_input": (OutputKind.GRADIENT_TO_USER_INPUT, "user_input_name", None),
    "token": (None, None, None),
}
"""For each kind of output: torch's kind, the field with its target, and the kind of input that the target must be."""


def _unproved(what: str, field: Field) -> RefusedError:
    return RefusedError(what, where=field.path, fix="load your own file and pass it to bitproof.prove")


def _identifier(field: Field) -> str:
    name = field.text()
    # torch writes names into code.
    if not _NAME.fullmatch(name) or keyword.iskeyword(name):
        raise field.wrong("a plain identifier")
    return name


def _target(field: Field) -> Any:
    name = field.text()
    if name in _ON_NUMBERS:
        return _ON_NUMBERS[name]
    parts = _OPERATOR.fullmatch(name)
    if parts is None:
        raise _unproved(f"a call of {name[:200]}, which is none of torch's own operators on tensors", field)
    space, packet, overload = parts.groups()
    # A lookup by name: nothing that the file names is imported.
    found = getattr(getattr(getattr(torch.ops, space), packet, None), overload, None)
    if not isinstance(found, OpOverload):
        raise _unproved(f"a call of {name}, an operator that this torch does not have", field)
    return found


def _constant(kind: str, field: Field) -> Any:
    match kind:
        case "as_none":
            return None
        case "as_int":
            return field.integer()
        case "as_float":
            return field.real()
        case "as_bool":
            return field.truth()
        case "as_string":
            return field.text()
        case "as_complex":
            parts = field.object(("real", "imag"))
            return complex(parts["real"].real(), parts["imag"].real())
        case "as_scalar_type":
            return _dtype(field)
        case "as_memory_format":
            return _among(field, _MEMORY_FORMATS)
        case "as_layout":
            return _among(field, _LAYOUTS)
        case "as_device":
            return _device(field)
        case "as_int_lists":
            return [tuple(x.integer() for x in own.list()) for own in field.list()]
        case "as_float_lists":
            return [[x.real() for x in own.list()] for own in field.list()]
    # The other kinds are lists of the kinds above: `as_ints` of `as_int`.
    return [_constant(kind.removesuffix("s"), x) for x in field.list()]


def _among(field: Field, known: Mapping[int, Any]) -> Any:
    if (number := field.integer()) not in known:
        raise field.wrong(f"one of {', '.join(str(x) for x in known.values())}, by number")
    return known[number]


def _dtype(field: Field) -> torch.dtype:
    dtype: torch.dtype = _among(field, DTYPES)
    return dtype


def _device(field: Field) -> torch.device:
    parts = field.object(("type",), ("index",))
    kind, index = parts["type"].text(), parts["index"].value
    if kind not in _DEVICES:
        raise parts["type"].wrong(f"one of {', '.join(_DEVICES)}")
    if index is not None and not 0 <= parts["index"].integer() < 128:
        raise parts["index"].wrong("null, or a number from 0 to 127")
    return torch.device(kind) if index is None else torch.device(kind, index)


def _closed(field: Field) -> int:
    return field.one_of(("as_int",))[1].integer()


def _check_number(field: Field) -> None:
    # Only the form is checked. The number itself is not used.
    kind, content = field.one_of(("as_int", "as_bool", "as_float", "as_expr"))
    if kind == "as_expr":
        parts = content.object(("expr_str",), ("hint",))
        check_expression(parts["expr_str"].text())
        if parts["hint"].value is not None:
            _constant(*parts["hint"].one_of(("as_int", "as_bool", "as_float")))
    else:
        _constant(kind, content)


def _fake(sizes: OpenSizesOfFile, meta: Mapping[str, Field] | None, field: Field) -> Tensor:
    if meta is None:
        raise field.wrong("an input with a layout among the graph's tensors")
    _among(meta["layout"], _LAYOUTS)
    meta["requires_grad"].truth()
    dtype, device = _dtype(meta["dtype"]), _device(meta["device"])
    shape, strides = ([sizes.size(x) for x in meta[part].list()] for part in ("sizes", "strides"))
    offset = sizes.size(meta["storage_offset"])
    refuse_layout(shape, strides, offset, field.path)
    # Proofs assume that each input starts at a multiple of `line_of`, where torch allocates memory.
    if not isinstance(offset, int) or offset * dtype.itemsize % line_of(device.type):
        raise RefusedError(f"an input that does not begin at a line of {line_of(device.type)} bytes", where=field.path)
    return torch.empty_strided(shape, strides, dtype=dtype, device=device)


def _on_device(value: Tensor, device: torch.device, payload: Field | None) -> Tensor:
    if device.type == "meta":
        raise TensorError(f"{payload.path if payload else 'a sample input'} has no values: it is on the meta device")
    return value if device.type == "cpu" else value.to(device)


def _fits(value: Tensor, like: Tensor) -> bool:
    # A size of the input that is a symbol fits any size.
    return value.dtype == like.dtype and value.dim() == like.dim() and all(map(_is_size, value.shape, like.shape))


def _is_size(own: Any, expected: Any) -> bool:
    return not isinstance(expected, int) or own == expected


def _check_state(found: SavedProgram, inputs: Sequence[Any]) -> None:
    for spec, like in zip(found.graph_signature.input_specs, inputs, strict=True):
        if spec.target is None:
            continue
        held = found.state_dict.get(spec.target, found.constants.get(spec.target))
        if held is None:
            raise FieldError(f"{spec.target} is an input of the graph, and the file has no values of it")
        layouts = [(x.dtype, [*x.shape], [*x.stride()], x.device.type) for x in (held, like)]
        if layouts[0] != layouts[1]:
            raise FieldError(f"{spec.target} is stored as {layouts[0]}, and is an input of the graph as {layouts[1]}")


def _returns(field: Field) -> str:
    for entry in field.list():
        parts = entry.object(("fqn",), ("signature",))
        # The entry without a name is the program itself; the others are its modules.
        if parts["fqn"].text() == "" and parts["signature"].value is not None:
            signature = parts["signature"].object(("inputs", "outputs", "in_spec", "out_spec"), ("forward_arg_names",))
            return signature["out_spec"].text()
    return ""
