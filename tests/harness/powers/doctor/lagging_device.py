"""A device of two streams and an allocator, of which each stream runs at once until it is told to lag.

What lags runs as late as it may: when somebody waits for it. Memory that is freed is handed out again at once, unless
the allocator was told of a stream that has not come past it. So whatever order a guard does not enforce is the wrong
one. `harness/graph/offload_operators.py` runs over it as it stands, less one of its guards where a test says so.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

from bitproof.harness.graph import offload_operators
from bitproof.harness.powers.doctor import checks


class Stream:
    """Calls in order. `wait_event` is one of them: it makes the event's stream run up to there."""

    def __init__(self, may_wait: Callable[[], bool] = lambda: True) -> None:
        self.calls: list[Callable[[], None]] = []
        self.done = 0
        self.lags = False
        self._may_wait = may_wait

    def launch(self, call: Callable[[], None]) -> None:
        self.calls.append(call)
        if not self.lags:
            self.run()

    def run(self, until: int | None = None) -> None:
        until = len(self.calls) if until is None else until
        while self.done < until:
            self.done += 1
            self.calls[self.done - 1]()

    def record_event(self) -> Event:
        return Event(self, len(self.calls))

    def wait_event(self, event: Event) -> None:
        if self._may_wait():
            self.launch(event.synchronize)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())


class Event(NamedTuple):
    """A place among a stream's calls. The host that waits for it makes the stream run up to there."""

    stream: Stream
    until: int

    def synchronize(self) -> None:
        self.stream.run(self.until)


class Memory:
    """Bytes, for as long as a tensor has them."""

    def __init__(self, num: int) -> None:
        self.values: list[float] = [0.0] * num
        self.users: list[Event] = []


class LaggingTensor:
    """What the checks and the operators need of a tensor on such a device, or in host memory."""

    def __init__(self, device: LaggingDevice, memory: Memory, is_cuda: bool) -> None:
        self.owner, self.memory, self.is_cuda = device, memory, is_cuda
        self.device = device if is_cuda else SimpleNamespace(type="cpu")

    def fill_(self, value: float) -> None:
        memory = self.memory
        self.owner.current.launch(lambda: memory.values.__setitem__(slice(None), [value] * len(memory.values)))

    def copy_(self, source: LaggingTensor, non_blocking: bool = False) -> None:
        to, of = self.memory, source.memory
        self.owner.active.launch(lambda: to.values.__setitem__(slice(None), of.values))

    def record_stream(self, stream: Stream) -> None:
        if (
            self.owner.without
            != f"{'a reload' if self.owner.is_reloading else 'an offload'}'s {self._role} is recorded"
        ):
            self.memory.users.append(stream.record_event())

    @property
    def _role(self) -> str:
        return "target" if self.owner.is_reloading else "source"

    def read(self) -> list[float]:
        if self.is_cuda:
            self.owner.current.run()
        return list(self.memory.values)

    def __del__(self) -> None:
        if self.is_cuda:
            self.owner.free.append(self.memory)


class LaggingDevice:
    """The device, in place of torch's: `type` is what the operators ask of it. `without` names a guard to leave out."""

    type = "cuda"

    def __init__(self, without: str | None = None) -> None:
        self.without = without
        self.is_reloading = False
        self.current, self.copies = Stream(self._may_current_wait), Stream(self._may_copies_wait)
        self.active = self.current
        self.free: list[Memory] = []
        self._waiting = ""

    def stand_in(self, patch: Any) -> None:
        """Have operators and checks use this device."""
        cuda = SimpleNamespace(current_stream=lambda device: self.current, stream=self._on)
        fake = SimpleNamespace(cuda=cuda, device=lambda *given: self)
        cuda.current_device = lambda: 0
        patch.setattr(offload_operators, "torch", fake)
        patch.setattr(offload_operators, "copy_stream", lambda device: self.copies)
        patch.setattr(offload_operators, "empty_like", lambda x, device, pin=False: self.empty(x, device))
        patch.setattr(checks, "filled", self._filled)
        patch.setattr(checks, "lag", lambda device: setattr(self.current, "lags", True))
        patch.setattr(checks, "lag_copies", lambda device: setattr(self.copies, "lags", True))
        patch.setattr(checks, "OFFLOAD", self._as("offload", offload_operators.run_offload))
        patch.setattr(checks, "WAIT_OFFLOAD", self._as("wait_offload", offload_operators.run_wait_offload))
        patch.setattr(checks, "RELOAD", self._as("reload", offload_operators.run_reload))
        patch.setattr(checks, "WAIT_RELOAD", self._as("wait_reload", offload_operators.run_wait_reload))

    def empty(self, like: LaggingTensor, device: Any) -> LaggingTensor:
        """Memory as the allocator has it: what was freed last, once all streams that it was told of are past it."""
        is_cuda = device is self
        ready = [m for m in self.free if all(stream.done >= until for stream, until in m.users)] if is_cuda else []
        if ready:
            self.free.remove(ready[-1])
        return LaggingTensor(self, ready[-1] if ready else Memory(len(like.memory.values)), is_cuda)

    def _filled(self, num: int, value: float, device: Any) -> LaggingTensor:
        found = self.empty(SimpleNamespace(memory=Memory(num)), self)  # type: ignore[arg-type]
        found.fill_(value)
        return found

    def _as(self, name: str, operator: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            self._waiting, self.is_reloading = name, "reload" in name
            return operator(*given)

        return call

    @contextmanager
    def _on(self, stream: Stream) -> Any:
        before, self.active = self.active, stream
        yield
        self.active = before

    def _may_current_wait(self) -> bool:
        return self.without != self._waiting

    def _may_copies_wait(self) -> bool:
        what = {"offload": "an offload", "reload": "a reload"}[self._waiting]
        return self.without != f"{what} waits for the current stream"
