"""Lends torch's default process group to user code, which can initialize and destroy it as if it ran alone.

bitproof needs the group before the user's code starts and after it ends. So `install` replaces two functions of torch,
which behave differently within the context `lent`:

1. The first `init_process_group` creates no group, but gives user code the existing group. It refuses arguments that
   ask for a different group.
2. `destroy_process_group()` only hides the group and all groups that user code has made. Then `is_initialized()` is
   False. Another `init_process_group` makes the groups visible again.

`install` must run before user code can import the two functions by name. bitproof's own code inside user code runs in
the context `as_lent`, in which the groups are always visible.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from bitproof.harness.errors import UsageError
from bitproof.harness.torch_distributed import KnownGroups, replace_function
from bitproof.harness.within_user_code import refused

# Torch's own functions, before `install` replaces them.
_init, _destroy = dist.init_process_group, dist.destroy_process_group
_ENVIRONMENT = {"rank": "RANK", "world_size": "WORLD_SIZE"}
_IMMATERIAL = ("init_method", "store", "timeout", "group_name")
"""Arguments that do not affect the group itself: they only state how ranks find each other and how long they wait."""


class _Loan:
    """The default group, lent to user code on `device`.

    - `is_taken`: whether user code has called `init_process_group`.
    - `aside`: the hidden groups; None if no groups are hidden.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_taken = False
        self.aside: KnownGroups | None = None


_loans: list[_Loan] = []


def install() -> None:
    """Replace `init_process_group` and `destroy_process_group` in all modules of torch.

    A second call changes nothing.
    """
    replace_function(_init, _init_process_group)
    replace_function(_destroy, _destroy_process_group)


@contextmanager
def lent(device: torch.device) -> Iterator[None]:
    install()
    loan = _Loan(device)
    _loans.append(loan)
    try:
        yield
    finally:
        _loans.remove(loan)
        # The caller needs the groups, even if user code has destroyed them.
        if loan.aside is not None:
            loan.aside.exchange()


def put_aside() -> None:
    """Hide the default process group and all other groups until user code calls `init_process_group`.

    Does nothing outside the context `lent`, or if the groups are hidden already.
    """
    loan = _loans[-1] if _loans else None
    if loan is not None and loan.aside is None:
        # So the next `init_process_group` brings the groups back.
        loan.is_taken = False
        loan.aside = KnownGroups().exchange()


@contextmanager
def as_lent() -> Iterator[None]:
    """Context for bitproof's own code: the lent groups are visible, even if user code has destroyed them."""
    loan = _loans[-1] if _loans else None
    if loan is None or loan.aside is None:
        yield
        return
    lent_groups, loan.aside = loan.aside, None
    # Groups that user code has made since its destruction are hidden meanwhile.
    theirs = lent_groups.exchange()
    try:
        yield
    finally:
        loan.aside = theirs.exchange()


@functools.wraps(_init)
def _init_process_group(*args: Any, **kwargs: Any) -> None:
    loan = _loans[-1] if _loans else None
    if loan is None or loan.is_taken or (loan.aside is not None and dist.is_initialized()):
        return _init(*args, **kwargs)  # it raises, as the group exists already
    # The check reads the group's backend and rank, so the group must be visible.
    with as_lent():
        _refuse_another(loan.device, args, kwargs)
    # Only after the check: a refused call has taken nothing.
    loan.is_taken = True
    if loan.aside is not None:
        loan.aside.exchange()
        loan.aside = None
    return None


@functools.wraps(_destroy)
def _destroy_process_group(group: Any = None) -> None:
    loan = _loans[-1] if _loans else None
    is_default = group is None or group is dist.group.WORLD
    # torch itself destroys a group that user code has made, and reports a second destruction.
    if loan is None or loan.aside is not None or not is_default:
        return _destroy(group)
    # Torch's own function would end the group, which bitproof still needs.
    put_aside()
    return None


def _refuse_another(device: torch.device, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    signature = inspect.signature(_init)
    asked = signature.bind(*args, **kwargs).arguments
    # An explicit default asks for nothing.
    given = {name: value for name, value in asked.items() if value != signature.parameters[name].default}
    backend, own = dist.get_backend(), {"rank": dist.get_rank(), "world_size": dist.get_world_size()}
    if "store" not in given and given.get("init_method", "env://").startswith("env://"):
        # torch itself reads these from the environment.
        for name, variable in _ENVIRONMENT.items():
            given.setdefault(name, int(os.environ.get(variable, -1)))
    for name, value in given.items():
        # For each argument, whether its value fits the group that exists. Unknown arguments never fit.
        is_ours = {
            "backend": lambda value: _backend_for(device.type, value) == backend,
            "device_id": lambda value: _is_device(value, device),
            "rank": lambda value: value == own["rank"],
            "world_size": lambda value: value == own["world_size"],
        }.get(name, lambda value, name=name: name in _IMMATERIAL)
        if not is_ours(value):
            raise refused(
                UsageError(
                    f"init_process_group was called with {name}={value!r}, which asks for another default group than "
                    "the one that bitproof has made of the case's ranks",
                    expected=f"backend={str(backend)!r}, rank={own['rank']}, world_size={own['world_size']} "
                    f"on {device}, or no arguments",
                    found=f"{name}={value!r}",
                    fix="leave the argument out, or read it from the environment, which says what torchrun says",
                )
            )


def _is_device(given: Any, device: torch.device) -> bool:
    asked = torch.device(device.type, given) if isinstance(given, int) else torch.device(given)
    # A device without an index, such as `cuda`, fits the device of any rank.
    return asked.type == device.type and asked.index in (None, device.index)


def _backend_for(device: str, name: Any) -> str | None:
    """Return the backend in a name such as `gloo` or `cpu:gloo,cuda:nccl` for a device type; None if there is none."""
    # A backend without a device type, such as `gloo`, is for all of them.
    parts = [part.split(":", 1) if ":" in part else [device, part] for part in str(name).lower().split(",")]
    return {of: backend for of, backend in parts}.get(device)
