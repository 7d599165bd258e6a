"""Replace outputs and inputs of calls with values of the other system, while a rank's calls are logged.

- An output is overwritten in its memory, after the call or after a collective's wait.
- An output that shares memory with an argument, such as a view, becomes a new tensor. The shared memory stays
  unchanged.
- An input becomes a new tensor for this call alone. If the plan says so, its memory is overwritten instead, for all
  later readers too.

Nothing is replaced if the value cannot be read or has another dtype or shape, or if the call is of another operator
than planned. Then `made` has the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from bitproof.harness.capture.digest import plain
from bitproof.harness.errors import BitproofError, RecordingError
from bitproof.harness.localize.logs.replay import (
    OTHER_INPUTS,
    OTHER_TYPE,
    UNSTEADY,
    Exchanged,
    ValueExchange,
    ValueSite,
    archive_of,
    read_value,
)
from bitproof.harness.torch_compat import disable_current_modes, unsafe_preserve_version_counter
from bitproof.harness.torch_operators import storage_key


class Exchanges:
    """Makes the planned exchanges in a rank's step.

    `made` has the outcome of each exchange. `digest` returns a tensor's digest.
    """

    def __init__(self, digest: Callable[[Tensor], str], planned: Iterable[ValueExchange] = ()) -> None:
        self.made: list[Exchanged] = []
        self._digest = digest
        self._planned = {(e.site.call, e.site.is_input, e.site.position): e for e in planned}
        # The values that exchanges have inserted so far, and the calls with a planned exchange, for a quick check.
        self._written = set[str]()
        self._calls = {(call, is_input) for call, is_input, _ in self._planned}

    def __bool__(self) -> bool:
        return bool(self._planned)

    def of_inputs(self, call: int, operator: str, read: Sequence[Tensor], written: Sequence[Tensor]) -> dict[int, Any]:
        """Return new tensors for inputs of a call that is about to run, as `id` of the replaced tensor -> new tensor.

        `read` are the call's inputs, and `written` the tensors that it writes in place.
        """
        if (call, True) not in self._calls:
            return {}
        # An argument that the call writes must stay the same tensor: its other readers expect the result there.
        owned = {id(tensor) for tensor in written}
        digests, found = [*map(self._digest, read)], list[tuple[Tensor, Tensor]]()
        planned = [p for p in range(len(read)) if (call, True, p) in self._planned]
        # Those with a condition come last: it may be about another input that is exchanged for this call as well.
        for position in sorted(planned, key=lambda p: self._planned[call, True, p].reads is not None):
            tensor, keeps = read[position], id(read[position]) not in owned
            other = self.put(call, position, tensor, operator, tuple(digests), keeps=keeps, is_input=True)
            found.append((tensor, other))
            # The next condition is about the inputs that the call will read, exchanged ones included.
            digests[position] = self._digest(other)
        return {id(tensor): other for tensor, other in found if other is not tensor}

    def of_outputs(
        self,
        call: int,
        operator: str,
        outputs: Sequence[Tensor],
        given: Sequence[Tensor],
        written: Sequence[Tensor],
        reads: tuple[str, ...],
    ) -> dict[int, Any]:
        """Return replacements for outputs of a call that has run, as `id` of an output -> the tensor that replaces it.

        `given` are the call's arguments, `written` the arguments that it wrote in place, `reads` its inputs' digests.
        """
        if (call, False) not in self._calls:
            return {}
        # An output that shares memory with an argument that the call only reads, such as a view: writing into it would
        # change the argument, too.
        owned = {id(tensor) for tensor in written}
        shared = {storage_key(x) for x in given if x.layout is torch.strided and id(x) not in owned}
        found = dict[int, Any]()
        for position, tensor in enumerate(outputs):
            keeps = id(tensor) not in owned and tensor.layout is torch.strided and storage_key(tensor) in shared
            other = self.put(call, position, tensor, operator, reads, keeps=keeps)
            if other is not tensor:
                found[id(tensor)] = other
        return found

    def put(
        self,
        call: int,
        position: int,
        tensor: Tensor,
        operator: str,
        reads: tuple[str, ...] | None = None,
        *,
        keeps: bool = False,
        is_input: bool = False,
    ) -> Tensor:
        """Return `tensor`, or the other system's value if the plan replaces this input or output of a call.

        `position` counts the call's outputs or, with `is_input`, its inputs. With `keeps`, the memory of `tensor` stays
        unchanged, unless the plan says that it is overwritten.
        """
        planned = self._planned.get((call, is_input, position))
        if planned is None:
            return tensor
        held = self._digest(tensor)
        if not self._is_to_be_made(planned, held, operator, reads):
            return tensor
        try:
            with disable_current_modes(), torch.no_grad():
                other = self._exchanged(planned, tensor, keeps and not planned.in_place)
        # A failed exchange must not end the run: its reason is part of the verification.
        except BitproofError as error:
            self._note(planned, held, error.what)
            return tensor
        except RuntimeError as error:  # torch refuses to write there
            self._note(planned, held, f"{error}".partition("\n")[0])
            return tensor
        # Elements of the tensor may share memory, which then cannot hold the value.
        self._note(planned, held, "" if self._digest(other) == planned.wanted else "its memory holds no such value")
        return other

    def number(self, call: int, operator: str, number: Any, reads: tuple[str, ...]) -> Any:
        """Return the number that a call reads out of a tensor, or the other system's number if the plan replaces it."""
        planned = self._planned.get((call, False, 0))
        held = describe_number(number)
        if planned is None or not self._is_to_be_made(planned, held, operator, reads):
            return number
        other = type(number)(read_value(archive_of(planned.archives, planned.site.rank), planned.name).item())
        self._note(planned, held, "" if describe_number(other) == planned.wanted else "the value is another number")
        return other

    def _is_to_be_made(self, planned: ValueExchange, held: str, operator: str, reads: tuple[str, ...] | None) -> bool:
        """Whether to make a planned exchange. If not, also note its outcome. `held` is the digest of the present value.

        A value that is right already is not exchanged, and counts as done.
        """
        # An earlier exchange may have corrected this call's input. Then nothing needs to be written.
        is_right = held == planned.wanted
        if operator != planned.operator:
            self._note(planned, held, f"another call stands there: {operator}, not {planned.operator}")
        elif planned.reads is not None and reads != planned.reads:
            self._note(planned, held, OTHER_INPUTS)
        elif planned.found not in ("", held) and not (is_right and held in self._written):
            self._note(planned, held, UNSTEADY)
        elif is_right:
            self._note(planned, held, "")
        else:
            return True
        return False

    def _note(self, planned: ValueExchange, held: str, problem: str) -> None:
        self.made.append(Exchanged(planned.site, not problem, problem, held))
        if not problem:
            self._written.add(planned.wanted)

    def _exchanged(self, planned: ValueExchange, tensor: Tensor, beside: bool) -> Tensor:
        """Overwrite `tensor` with the other system's value and return `tensor`.

        With `beside`, leave `tensor` unchanged and return the value in a new tensor.
        """
        value = read_value(archive_of(planned.archives, planned.site.rank), planned.name)
        # The verifier recognizes OTHER_TYPE and UNSTEADY in the errors, and plans again or ends.
        types = type_of(plain(tensor)), type_of(value)
        if types[0] != types[1]:
            raise RecordingError(f"{types[0]} {OTHER_TYPE} {types[1]}")
        if self._digest(value) != planned.wanted:
            raise RecordingError(f"{UNSTEADY}: the other system's value did not come again")
        if not beside:
            return _overwrite(tensor, value)
        other = _in_new_memory(tensor, value)
        return other if self._digest(other) == planned.wanted else value.to(tensor.device)

    def left_out(self) -> list[Exchanged]:
        """Return an outcome "not done" for each planned exchange whose call did not run."""
        come = {(each.site.call, each.site.is_input, each.site.position) for each in self.made}
        missing = [planned.site for key, planned in self._planned.items() if key not in come]
        return [Exchanged(site, False, "the call did not come again") for site in missing]


def describe_number(number: Any) -> str:
    """Return the text in a log for a number that was read out of a tensor."""
    return f"number {number!r}"


def type_of(tensor: Tensor) -> str:
    """Return a tensor's dtype and shape: `float32[2, 3]`."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def replaced(values: Any, others: dict[int, Any]) -> Any:
    """Return nested values with some tensors replaced. `others` maps the `id` of an old tensor to the new tensor."""
    if isinstance(values, Tensor):
        return others.get(id(values), values)
    if isinstance(values, dict):
        return {name: replaced(value, others) for name, value in values.items()}
    if isinstance(values, list) or type(values) is tuple:
        return type(values)(replaced(value, others) for value in values)
    return values


def _overwrite(tensor: Tensor, value: Tensor) -> Tensor:
    """Write the value into the tensor's memory, unseen by autograd; returns the tensor."""
    local = plain(tensor)
    with torch.inference_mode(tensor.is_inference()), unsafe_preserve_version_counter(local):
        local.copy_(value)
    return tensor


def _in_new_memory(tensor: Tensor, value: Tensor) -> Tensor:
    """Return a new tensor with the value. It has the strides of `tensor`, unless elements of `tensor` share memory."""
    # The same strides, as kernels may be chosen by strides.
    local = plain(tensor)
    if not local.numel():
        return value.to(local.device)
    # One more than the index of the last element in memory.
    extent = 1 + sum((size - 1) * step for size, step in zip(local.shape, local.stride(), strict=True))
    memory = torch.empty(extent, dtype=local.dtype, device=local.device)
    return (
        memory.as_strided(local.shape, local.stride()).copy_(value)
        if _has_no_overlap(local)
        else value.to(local.device)
    )


def _has_no_overlap(tensor: Tensor) -> bool:
    """Whether no two elements share memory. False for an expanded tensor."""
    return all(step or size < 2 for size, step in zip(tensor.shape, tensor.stride(), strict=True))


def sites_of(sites: Iterable[ValueSite]) -> dict[int, list[ValueSite]]:
    """Return the sites among `sites` that are inputs, by the index of their call."""
    found: dict[int, list[ValueSite]] = {}
    for site in sites:
        if site.is_input:
            found.setdefault(site.call, []).append(site)
    return found
