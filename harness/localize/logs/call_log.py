"""Log every operator call of a step, eager or graph, with the digests of its inputs and outputs.

Calls are seen below autograd, so `F.linear` is `addmm` in eager code and in graphs.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, UntypedStorage
from torch.fx import GraphModule
from torch.multiprocessing.reductions import rebuild_tensor

from bitproof.harness import capture
from bitproof.harness.capture.digest import digest, plain
from bitproof.harness.disturb.deferred_work import IN_PLACE_COLLECTIVES, TO_ONE_RANK, HandleLog
from bitproof.harness.errors import RecordingError
from bitproof.harness.graph import offload_operators
from bitproof.harness.graph.operators import COLLECTIVE_NAMESPACES, UNINITIALIZED, is_view, name_of, row_of
from bitproof.harness.graph.staged.staged_step import StagedStep
from bitproof.harness.localize.call_sites import CallSiteTracker, finalize_calls
from bitproof.harness.localize.logs.call_arguments import given_to, read_by, scalars_of, tensors_in, written_by
from bitproof.harness.localize.logs.calls import KERNELS, OPAQUE, READS_OUT, Call, CallSite
from bitproof.harness.localize.logs.exchanges import Exchanges, describe_number, replaced, sites_of, type_of
from bitproof.harness.localize.logs.foreach_calls import lane, num_lanes
from bitproof.harness.localize.logs.node_call_sites import GraphRunner
from bitproof.harness.localize.logs.parts import Parts
from bitproof.harness.localize.logs.replay import ValueExchange, ValueSite
from bitproof.harness.operators import Uninitialized, names
from bitproof.harness.systems import script, watched_loop, watched_step
from bitproof.harness.systems.watched_step import WatchedStep
from bitproof.harness.torch_compat import TorchDispatchMode, disable_current_modes, is_wrapper_subclass
from bitproof.harness.torch_distributed import group_named, group_of
from bitproof.harness.torch_operators import has_no_values, overload_of, storage_key
from bitproof.harness.within_user_code import refusing, theirs

if TYPE_CHECKING:
    from bitproof.harness.systems.compiled import Capture, KernelGraph

# Their outputs are the values of another call, or uninitialized.
NOT_LOGGED = UNINITIALIZED | names(lambda row: row.is_identity)

_TORCH = os.path.dirname(torch.__file__) + os.sep
_OWN = (os.path.dirname(capture.__file__) + os.sep, watched_step.__file__, watched_loop.__file__, script.__file__)

GENERATORS = 0
"""A storage key for the states of all generators: generators with the same state draw the same numbers."""


_LAYING_OUT = {rebuild_tensor.__code__, UntypedStorage.clone.__code__}
"""Functions of torch that make a tensor of memory which no operator fills: see `_only_lays_out`."""


class _Inputs(NamedTuple):
    """The inputs of a call: their digests, and the indices of the calls that produced them.

    `unwritten` has the positions of inputs that are uninitialized memory. `outside` has the positions of inputs that
    were written outside torch's operators, for example by NumPy.
    """

    digests: tuple[str, ...]
    producers: tuple[int | None, ...]
    unwritten: tuple[int, ...] = ()
    outside: tuple[int, ...] = ()


class _Reading(NamedTuple):
    """The facts about a call that are collected before it runs, since it may overwrite its inputs.

    - `lanes`: 3 for a call over lists of 3 tensors that is split into 3 calls; 0 for a call that is not split.
    - `inputs`: an entry for each of the resulting calls.
    - `generator`, `state`: for a random call, its random generator and the digest of its state; else None.
    """

    lanes: int
    inputs: list[_Inputs]
    scalars: tuple[tuple[str, str], ...]
    generator: torch.Generator | None
    state: str | None


class CallRecorder(TorchDispatchMode):
    """A dispatch mode that logs calls into `calls`.

    - `place`: finds the running call's module, direction and graph node.
    - `keep`: inputs and outputs to copy into `kept`.
    - `spare`: a budget in bytes for copies of other outputs, kept while they fit.
    - `only_keeps`: whether to only copy values and count calls, without digests and places.
    - `exchanges`: values of the other system to insert before or after a call. The log shows these.

    `types` has the dtype and shape of each digest in `calls`: `float32[2, 3]`.

    A higher-order operator is one call. A call over lists of tensors is logged as a call per index. A random call has
    its generator's state as last input and last output. Calls by bitproof itself are not logged.
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: torch.compile's code stays compiled under this mode."""
        # By default it would run eagerly, and compute different bits.
        return True

    def __init__(
        self,
        place: CallSiteTracker,
        keep: Collection[ValueSite] = (),
        only_keeps: bool = False,
        spare: int = 0,
        rank: int = 0,
        exchanges: Collection[ValueExchange] = (),
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Call] = []
        self.kept: dict[ValueSite, Tensor] = {}
        self.types: dict[str, str] = {}
        self.exchanges = Exchanges(_digest, exchanges)
        self._rank, self._kept_inputs = rank, sites_of(keep)
        self._place = place
        self._keep, self._only_keeps, self._spare = keep, only_keeps, spare
        # By storage: the call that is still filling it, the living tensors over it, and whether it is new (`_fresh`).
        self._in_flight: dict[int, int] = {}
        self._works = HandleLog()
        self._seen: dict[int, dict[int, weakref.ref[Tensor]]] = {}
        self._fresh: dict[int, bool] = {}
        """Storages that no call has written yet, and whether they were allocated as zeros, as under stress."""
        self._written = set[int]()
        # By storage and value, since several tensors of one storage may be read after it was written in parts.
        self._producers: dict[tuple[int, str], int] = {}
        self._parts = Parts(_digest)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a call and log it."""
        # A DTensor dispatches first. It then calls operators on its local shards, and collectives: these are logged.
        if any(is_wrapper_subclass(each) for each in types):
            return NotImplemented
        kwargs = kwargs or {}
        name = name_of(function)
        if name in NOT_LOGGED or name.startswith("_record_function") or _is_own(sys._getframe(1)):
            result = function(*args, **kwargs)
            # `empty` is no call of a log. But a later read of its memory must be recognized as uninitialized.
            if row_of(function).uninitialized is Uninitialized.WHOLE and not self._only_keeps:
                self._see(tensors_in(result), is_fresh=True)
            return result
        if name == "set_" and _only_lays_out(sys._getframe(1)):
            result = function(*args, **kwargs)
            for tensor in tensors_in(result):
                # The memory may have the key of freed memory.
                self._fresh.pop(_storage(tensor), None)
                self._seen.pop(_storage(tensor), None)
            return result
        with refusing():
            if name == "wait_tensor" or function in offload_operators.WAITS:
                return self._wait(function, args)
            if self.exchanges or self._kept_inputs:
                args, kwargs = self._exchange_inputs(function, args, kwargs)
            # Inputs are digested before the call runs, since it may overwrite them.
            reading = self._reading(function, args, kwargs)
            result = theirs(function, *args, **kwargs)
            # Arguments too: the first call that is seen may read a tensor from before the step.
            tensors = tensors_in((args, kwargs, result))
            if any(map(has_no_values, tensors)):  # a DTensor infers a shape
                return result
            result = self._log(function, args, kwargs, reading, result)
            if not self._only_keeps:
                self._see(tensors)
            return result

    def _see(self, tensors: Sequence[Tensor], *, is_fresh: bool = False) -> None:
        """Remember tensors by their storage, to find the tensors that share a storage.

        `is_fresh`: whether the storage was just allocated, and no call wrote it yet.
        """
        for tensor in tensors:
            storage = _storage(tensor)
            # A new storage may have the key of a freed one, so tensors remembered under this key are forgotten.
            if is_fresh:
                self._seen[storage] = {}
                self._fresh[storage] = _has_bytes(tensor) and not plain(tensor).any()
            self._seen.setdefault(storage, {})[id(tensor)] = weakref.ref(tensor)

    def _exchange_inputs(self, function: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return a call's (args, kwargs). Inputs with a planned exchange are replaced by the other system's values.

        Also copies requested inputs into `kept`.
        """
        lanes, others = num_lanes(function, args, kwargs), dict[int, Any]()
        read, written = read_by(function, args, kwargs), written_by(function, args, kwargs)
        for number in range(lanes or 1):
            index = len(self.calls) + number
            inputs = tensors_in(lane(read, number, lanes) if lanes else read)
            others |= self.exchanges.of_inputs(index, _full_name(function), inputs, tensors_in(written))
            self._exchange_state(index, len(inputs), function, _generator(function, args, kwargs))
            for site in self._kept_inputs.get(index, ()):
                # The position after the tensors is that of the generator's state, as in the log.
                if site.position < len(inputs):
                    self.kept[site] = plain(inputs[site.position]).clone()
                elif (generator := _generator(function, args, kwargs)) is not None:
                    self.kept[site] = generator.get_state()
        return (replaced(args, others), replaced(kwargs, others)) if others else (args, kwargs)

    def _exchange_state(self, index: int, position: int, function: Any, generator: torch.Generator | None) -> None:
        """Set a random call's generator to the state that it had in the other system, if that exchange is planned."""
        if generator is not None and self.exchanges:
            state = generator.get_state()
            other = self.exchanges.put(index, position, state, _full_name(function), keeps=True, is_input=True)
            if other is not state:
                generator.set_state(other)

    def _reading(self, function: Any, args: Any, kwargs: Any) -> _Reading:
        lanes, generator = num_lanes(function, args, kwargs), _generator(function, args, kwargs)
        # Values are kept by the index of their call, so every call needs an entry, but no digests.
        if self._only_keeps:
            return _Reading(lanes, [_Inputs((), ())] * (lanes or 1), (), generator, _state(generator))
        read = read_by(function, args, kwargs)
        inputs = [self._inputs(lane(read, index, lanes)) for index in range(lanes)] or [self._inputs(read)]
        return _Reading(lanes, inputs, scalars_of(function, args, kwargs), generator, _state(generator))

    def _log(self, function: Any, args: Any, kwargs: Any, reading: _Reading, result: Any) -> Any:
        """Log a call that has run. Returns its result, in which outputs with a planned exchange are replaced."""
        lanes, inputs, left = reading.lanes, reading.inputs, _state(reading.generator)
        # A call with a generator may draw nothing, as dropout in evaluation.
        draws = left != reading.state
        # The state is an input, as it determines the drawn numbers.
        if draws:
            inputs = [self._with_state(inputs[0], str(reading.state))]
        namespace = getattr(function, "namespace", None)
        # c10d's collectives write their tensors, and are complete when their handle is waited for.
        if namespace == IN_PLACE_COLLECTIVES:
            result = self._with_logged_waits(function, tensors_in(written_by(function, args, kwargs)), result)
        written = written_by(function, args, kwargs)
        # A call over lists is logged as a call for each index, with its own written tensors and results.
        parts = [(written, result)]
        if lanes:
            results = result if isinstance(result, tuple) else (result,)
            parts = [(lane(written, index, lanes), lane(results, index, lanes)) for index in range(lanes)]
        if self._only_keeps:
            call = Call(
                CallSite(None, None), _full_name(function), (), (), collective=namespace in COLLECTIVE_NAMESPACES
            )
        else:
            call = self._entry(function, args, kwargs, reading, draws)
        given = tensors_in((args, kwargs)) if self.exchanges else []
        others = dict[int, Any]()
        for read, (part_written, part_result) in zip(inputs, parts, strict=True):
            if self.exchanges and (outputs := self._outputs(function, part_written, part_result)):
                facts = len(self.calls), _full_name(function), outputs, given, tensors_in(part_written), read.digests
                others |= self.exchanges.of_outputs(*facts)
                part_result = replaced(part_result, others)
            # After the exchange, so that aliases and outputs show the inserted values.
            aliases = self._changed_aliases(len(self.calls), _full_name(function), tensors_in(part_written), read)
            values = tuple(value for _, value in aliases)
            here = call._replace(inputs=read.digests, aliases=values, producers=read.producers)
            self.calls.append(here._replace(unwritten=read.unwritten, outside=read.outside))
            self._producers |= dict.fromkeys(aliases, len(self.calls) - 1)
            self._add_outputs(function, part_written, part_result)
            if draws:
                self._add_state(len(self.calls) - 1, reading.generator, read.digests)
            if name_of(function) == READS_OUT:
                result = self._add_number(len(self.calls) - 1, result, read.digests)
        return replaced(result, others) if others else result

    def _add_state(self, index: int, generator: torch.Generator | None, reads: tuple[str, ...]) -> None:
        """Add the generator's new state as the last output of a random call."""
        assert generator is not None, "it has drawn from one"
        call, state = self.calls[index], generator.get_state()
        site = ValueSite(self._rank, index, len(call.outputs))
        other = self.exchanges.put(index, site.position, state, call.operator, reads, keeps=True)
        if other is not state:
            generator.set_state(other)
        if site in self._keep:
            self.kept[site] = other.clone()
        self._add_value(index, GENERATORS, _digest(other))

    def _add_number(self, index: int, number: Any, reads: tuple[str, ...]) -> Any:
        """Log a number that a call such as `item()` has read out of a tensor, as the output of this call.

        Returns the number, or the other system's number if its exchange is planned.
        """
        number = self.exchanges.number(index, self.calls[index].operator, number, reads)
        if (site := ValueSite(self._rank, index, 0)) in self._keep:
            self.kept[site] = torch.tensor(number)
        self._add_value(index, GENERATORS, describe_number(number))
        return number

    def _entry(self, function: Any, args: Any, kwargs: Any, reading: _Reading, draws: bool) -> Call:
        """Return the log entry of a call that has run. Its inputs and outputs are added later."""
        # The place of a call outside autograd depends on whether it reads a result of backward or of the update.
        read_here = [number for each in reading.inputs for number in each.producers if number is not None]
        follows = any(self.calls[producer].place.direction in ("backward", "update") for producer in read_here)
        place, node, source = self._place(name_of(function), tensors_in((args, kwargs)), follows)
        collective = getattr(function, "namespace", None) in COLLECTIVE_NAMESPACES
        tags = [pair for pair in reading.scalars if collective and pair[0] == "tag"]
        return Call(
            place,
            _full_name(function),
            (),
            (),
            node,
            source,
            collective,
            view=is_view(function),
            scalars=tuple(pair for pair in reading.scalars if pair not in tags),
            peers=_peers(function, args, kwargs) if collective else (),
            micro_batch=self._place.micro_batch_of(place),
            draws=draws,
            part=self._place.part_of(place),
            tag=dict(tags).get("tag", ""),
        )

    def _with_state(self, read: _Inputs, state: str) -> _Inputs:
        """Return a random call's inputs, followed by the generator's state before the call.

        The producer of the state is the random call that left the generator in it.
        """
        # `producers` may go on after those of the inputs, with writers of parts: the state's comes before these.
        own, more = read.producers[: len(read.digests)], read.producers[len(read.digests) :]
        producers = (*own, self._producers.get((GENERATORS, state)), *more)
        return read._replace(digests=(*read.digests, state), producers=producers)

    def _add_outputs(self, function: Any, written: Any, result: Any) -> None:
        """Add the outputs to the entry of the call that was logged last.

        If the outputs must be waited for, `_wait` adds them. Until then, their storages are noted as in flight.
        """
        index, namespace = len(self.calls) - 1, getattr(function, "namespace", None)
        in_place = namespace == IN_PLACE_COLLECTIVES
        if (self.calls[index].collective and not in_place) or function in offload_operators.COPIES:
            self._in_flight |= dict.fromkeys(map(_storage, tensors_in(result)), index)
        else:
            for tensor in self._outputs(function, written, result):
                self._add_output(index, tensor)

    def _outputs(self, function: Any, written: Any, result: Any) -> list[Tensor]:
        """Return the outputs that are complete when a call returns: an empty list if the call must be waited for."""
        namespace = getattr(function, "namespace", None)
        in_place = namespace == IN_PLACE_COLLECTIVES
        is_awaited = namespace in COLLECTIVE_NAMESPACES and not in_place
        if is_awaited or function in offload_operators.COPIES or (in_place and name_of(function) in TO_ONE_RANK):
            return []
        return tensors_in(written if in_place else (result, written))

    def _with_logged_waits(self, function: Any, written: list[Tensor], result: Any) -> Any:
        """Return the result of a c10d collective, with its async handles wrapped so that a wait logs the outputs."""
        index = len(self.calls)

        def arrived() -> None:
            for tensor in written:
                self._add_output(index, self._exchanged(index, tensor))

        return self._works.held(function, result, written, index, arrived)

    def _inputs(self, values: Any) -> _Inputs:
        """Return the digest of each input, and its producer: the logged call that wrote the input's value.

        - If a collective or copy is still writing to the input's memory, the producer is the call that launched it.
        - If several calls wrote parts of the input, the producer is the last of these calls. All these calls are also
          listed after the producers of the inputs.
        """
        # `more` are the writers of parts.
        found: list[tuple[str, int | None]] = []
        more: list[int] = []
        unwritten, outside = list[int](), list[int]()
        for position, tensor in enumerate(tensors_in(values)):
            storage, value = _storage(tensor), self._digest_of(tensor)
            # By storage and value: other tensors over the storage may have been written since. Without such a call, a
            # collective in flight is the producer, since this call races with it.
            left = self._producers.get((storage, value), self._in_flight.get(storage))
            is_whole = storage in self._in_flight or (left is not None and value in self.calls[left].outputs)
            parts = [] if is_whole else self._parts.inside(storage, tensor)
            found.append((value, max(parts, default=None) if left is None else left))
            more += parts
            # No call wrote this value. In memory of this step it is either what new memory is filled with, or it was
            # written behind torch's back. Memory from before the step may hold any value.
            if found[-1][1] is None and value != OPAQUE and self._is_of_step(storage):
                is_fresh = storage in self._fresh and _is_filled(tensor, with_zeros=self._fresh[storage])
                (unwritten if is_fresh else outside).append(position)
        producers = (*(left for _, left in found), *more)
        return _Inputs(tuple(value for value, _ in found), producers, tuple(unwritten), tuple(outside))

    def _is_of_step(self, storage: int) -> bool:
        """Whether a call of this step allocated or wrote a storage, and some tensor has kept it alive since."""
        is_written = storage in self._fresh or storage in self._written
        return is_written and any(tensor() is not None for tensor in self._seen.get(storage, {}).values())

    def _changed_aliases(
        self, index: int, operator: str, written: list[Tensor], read: _Inputs
    ) -> list[tuple[int, str]]:
        """Return the storage and digest of each other tensor whose value changed because a call wrote its memory.

        These tensors are exchanged and kept like outputs.
        """
        if self._only_keeps:
            return []
        # Weak references return None for tensors that are gone. A value that has a producer did not change here.
        same = [(_storage(x), tensor()) for x in written for tensor in self._seen.get(_storage(x), {}).values()]
        others = [(storage, x) for storage, x in same if x is not None and all(x is not y for y in written)]
        changed = [(storage, x) for storage, x in others if (storage, _digest(x)) not in self._producers]
        # Negative positions are aliases: see `ValueSite`.
        for number, (_, tensor) in enumerate(changed, 1):
            self.exchanges.put(index, -number, tensor, operator, read.digests)
            if (site := ValueSite(self._rank, index, -number)) in self._keep:
                self.kept[site] = plain(tensor).clone()
        return [(storage, _digest(x)) for storage, x in changed]

    def _wait(self, function: Any, args: Any) -> Any:
        """Wait for a collective or a copy, and log its result as an output of the call that launched it."""
        result = theirs(function, *args)
        offload_operators.land(result)
        # A second wait for the same collective finds nothing in flight, and adds no output.
        index = self._in_flight.pop(_storage(args[0]), None)
        if index is not None:
            self._add_output(index, self._exchanged(index, result))
        return result

    def _exchanged(self, index: int, tensor: Tensor) -> Tensor:
        """Return a call's completed output. If its exchange is planned, it has the other system's value."""
        call = self.calls[index]
        return self.exchanges.put(index, len(call.outputs), tensor, call.operator, call.inputs)

    @refusing()
    def kernels_called(self, graph: KernelGraph, kernels: Callable[[list[Any]], Any], inputs: list[Any]) -> Any:
        """Run a graph that Inductor compiled, and log it as a single call.

        The field `scalars` of the entry has, for each output, the call in the graph that computes it. Outputs beyond
        the first `graph.num_visible` are not logged.
        """
        # `inputs` is a list that the kernels empty, to free its tensors early.
        read, place = list(inputs), CallSite(graph.module, graph.direction)
        digests, producers, _, _ = self._inputs(read)
        # Calls within the kernels are Inductor's, so they are not logged.
        with disable_current_modes():
            result = theirs(kernels, inputs)
        index = len(self.calls)
        computed_by = tuple((str(position), text) for position, text in enumerate(graph.outputs[: graph.num_visible]))
        self.calls.append(
            Call(place, f"{KERNELS}{graph.label}", digests, (), graph.label, producers=producers, scalars=computed_by)
        )
        for position, tensor in enumerate(result):
            if isinstance(tensor, Tensor) and position < graph.num_visible:
                self._add_output(index, self._exchanged(index, tensor))
            # Inductor's own outputs, such as saved activations, have no counterpart in the reference. But a later graph
            # that reads one needs its producer.
            elif isinstance(tensor, Tensor):
                self._producers[_storage(tensor), _digest(tensor)] = index
        # Kernels may also write their inputs in place.
        for tensor, before in zip(tensors_in(read), digests, strict=True):
            if _digest(tensor) != before:
                self._add_output(index, tensor)
        return result

    def forget_abandoned(self) -> None:
        """Remove the outputs of c10d collectives that were never waited for."""
        # So their entries are like those of functional collectives, which have no outputs without a wait.
        for index in self._works.abandoned():
            self.calls[index] = self.calls[index]._replace(outputs=())

    def _add_output(self, index: int, tensor: Tensor) -> None:
        call = self.calls[index]
        site, size = ValueSite(self._rank, index, len(call.outputs)), tensor.numel() * tensor.element_size()
        is_spare = 0 < size <= self._spare and tensor.layout is torch.strided and _has_bytes(tensor)
        self._spare -= size if is_spare else 0
        if is_spare or site in self._keep:
            self.kept[site] = plain(tensor).clone()
        storage, value = _storage(tensor), "" if self._only_keeps else self._digest_of(tensor)
        self._add_value(index, storage, value)
        # A view shows memory, and leaves it as uninitialized as it was.
        if not call.view:
            self._written.add(storage)
            self._fresh.pop(storage, None)
        if not call.view and not self._only_keeps:
            self._parts.leave(storage, tensor, value, index)

    def _digest_of(self, tensor: Tensor) -> str:
        """Return a tensor's digest, and note its dtype and shape in `types`."""
        value = _digest(tensor)
        if value != OPAQUE and value not in self.types:
            self.types[value] = type_of(plain(tensor))
        return value

    def _add_value(self, index: int, storage: int, value: str) -> None:
        call = self.calls[index]
        self.calls[index] = call._replace(outputs=(*call.outputs, value))
        self._producers[storage, value] = index


def _is_own(frame: FrameType | None) -> bool:
    """Whether bitproof's recording called an operator: the nearest frame outside torch is in the recording's files.

    Such calls only record the tensors of a step. They are not part of the step.
    """
    # Generated code has a file name such as "<string>".
    while frame is not None and frame.f_code.co_filename.startswith((_TORCH, "<")):
        frame = frame.f_back
    # The sum of a loop's losses is an exception: it is logged, because it connects the recorded loss with the losses
    # that the loop computed.
    code = frame.f_code if frame is not None else watched_loop.sum_of_losses.__code__
    return code.co_filename.startswith(_OWN) and code is not watched_loop.sum_of_losses.__code__


def _only_lays_out(frame: FrameType | None) -> bool:
    """Whether a call of `set_` computes nothing: it makes a tensor of memory that torch fills outside of operators.

    - A tensor that another process has sent, such as a worker of a DataLoader. A batch may arrive in this step or in
      the next. If this call counted, all later calls would have another index in another run.
    - The memory of a copy that `copy.deepcopy` makes. It is not filled yet, so that its bits differ from run to run.
    """
    while frame is not None and frame.f_code.co_filename.startswith(_TORCH):
        if frame.f_code in _LAYING_OUT:
            return True
        frame = frame.f_back
    return False


def _full_name(function: Any) -> str:
    """Return an operator with its overload, unless that is the default: "add.Tensor", "silu"."""
    overload = overload_of(function)
    return name_of(function) if overload == "default" else f"{name_of(function)}.{overload}"


def _peers(function: Any, args: Any, kwargs: Any) -> tuple[int, ...]:
    """Return the ranks of a collective's group; for a point-to-point message, sender and receiver; empty if unknown."""
    given = given_to(function, args, kwargs)
    # A functional collective names its group; a c10d collective takes the group itself, and `dst` and `src` are ranks
    # within it.
    try:
        named = given.get("group_name")
        group = group_named(named) if isinstance(named, str) else group_of(given["process_group"])
        ranks = tuple(dist.get_process_group_ranks(group))
        me = dist.get_rank()
        if name_of(function) == "send":
            return me, ranks[given["dst"]]
        return (ranks[given["src"]], me) if name_of(function) == "recv_" else ranks
    except (KeyError, RuntimeError, ValueError, TypeError):
        return ()


def _digest(tensor: Tensor) -> str:
    """Return a tensor's digest. A tensor that has none, such as a sparse one, gets `OPAQUE`, so all of these count as
    equal.
    """
    try:
        return digest(tensor)
    except (RecordingError, RuntimeError):
        return OPAQUE


def _is_filled(tensor: Tensor, *, with_zeros: bool) -> bool:
    """Whether a tensor looks like uninitialized memory: all its elements are NaN, the largest integer, or True.

    With `with_zeros`, for a run under stress: all its elements are zero.
    """
    # In deterministic mode torch fills new memory with these values; under stress it is filled with zeros.
    local = plain(tensor)
    if with_zeros:
        return not local.any()
    if local.dtype.is_floating_point or local.dtype.is_complex:
        return bool(local.isnan().all())
    return bool((local if local.dtype is torch.bool else local == torch.iinfo(local.dtype).max).all())


def _has_bytes(tensor: Tensor) -> bool:
    """Whether a tensor can be copied. A compiler's tensors may have no memory during tracing."""
    try:
        plain(tensor)
    except (RecordingError, RuntimeError):
        return False
    return True


def _storage(tensor: Tensor) -> int:
    return storage_key(tensor) if tensor.layout is torch.strided else id(tensor)


def _generator(function: Any, args: Any, kwargs: Any) -> torch.Generator | None:
    """Return the generator from which a call may draw; None if the call is not random.

    It is the call's argument `generator` or, without one, the default generator of its device.
    """
    if torch.Tag.nondeterministic_seeded not in getattr(function, "tags", ()):
        return None
    given = given_to(function, args, kwargs)
    if isinstance(named := given.get("generator"), torch.Generator):
        return named
    # A factory function states its device; other calls draw on the device of their tensors.
    devices = [torch.device(given["device"])] if given.get("device") else [x.device for x in tensors_in((args, kwargs))]
    if any(device.type == "cuda" for device in devices):
        return torch.cuda.default_generators[torch.cuda.current_device()]
    return torch.default_generator


def _state(generator: torch.Generator | None) -> str | None:
    """Return the digest of a generator's state, as recordings have it; None without a generator."""
    return None if generator is None else digest(generator.get_state())


@contextmanager
def logged(
    system: Any,
    keep: Collection[ValueSite] = (),
    captured: Capture | None = None,
    stays_whole: bool = False,
    only_keeps: bool = False,
    spare: int = 0,
    rank: int = 0,
    exchanges: Collection[ValueExchange] = (),
) -> Iterator[CallRecorder]:
    """Context in which every operator call that a system makes on this thread is logged.

    - `keep`, `only_keeps`, `spare`: the values to copy. See `CallRecorder`.
    - `rank`, `exchanges`: the running rank, and the values to insert.
    - `captured`: the graphs of a system that bitproof compiles.
    - `stays_whole`: whether code of torch.compile stays whole, instead of being split where modules begin.

    The places of calls are found through attributes of the system: `model`, `gradients` (the function that computes
    gradients), `graph`, `running_chunk` and `running_half`. Without these, calls have no place.
    """
    model = getattr(system, "model", None)
    shown = system if isinstance(system, WatchedStep) else model  # which may have several
    running = [getattr(system, name, lambda: None) for name in ("running_chunk", "running_half")]
    places = CallSiteTracker(shown.named_modules if shown is not None else tuple, *running)
    places.stays_whole = stays_whole or captured is not None
    recorder = CallRecorder(places, keep, only_keeps, spare, rank, exchanges)
    # Attributes of the system that are wrapped while it runs, with their own values, which are restored at the end.
    replaced = {}

    def replace(name: str, value: Any) -> None:
        replaced[name] = getattr(system, name)
        setattr(system, name, value)

    places.shows_gradients = hasattr(system, "gradients")
    places.computes_gradients = not places.shows_gradients
    if places.shows_gradients:
        replace("gradients", _marked(system.gradients, places))
    if isinstance(graph := getattr(system, "graph", None), GraphModule):
        replace("graph", GraphRunner(graph, places).run)
    run = lambda module: GraphRunner(module, places).run  # noqa: E731
    by_node = captured.run_by(run, recorder.kernels_called) if captured else nullcontext()
    by_parts = graph.run_by(run) if isinstance(graph, StagedStep) else nullcontext()
    try:
        with places.following(), by_node, by_parts, recorder:
            yield recorder
        # Only at the end of the step it is known which collectives were never waited for, and what backward leads to.
        recorder.forget_abandoned()
        recorder.calls = finalize_calls(recorder.calls)
    finally:
        for name, value in replaced.items():
            setattr(system, name, value)


def _marked(gradients: Callable[..., Any], places: CallSiteTracker) -> Callable[..., Any]:
    def marked(*args: Any, **kwargs: Any) -> Any:
        places.computes_gradients = True
        try:
            return gradients(*args, **kwargs)
        finally:
            places.computes_gradients = False

    return marked
