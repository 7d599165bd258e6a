"""Find races in a graph: two calls that use the same memory, although neither happens before the other. Imports no
torch.

Example: `all_reduce(x)` is launched, and `x.mul_(2)` runs before the wait. A race needs a call that writes or frees the
memory.

The caller reports each call to `Order`, in the graph's order: the memory that it reads and writes, the work that it
launches, and the waits. A key names a piece of memory, and each value has a key or several. `harness.operators.rows`
lists the operators that launch, wait and order streams. The rules are those of torch's CUDA sanitizer:

1. Calls of a stream run in order, and different streams run concurrently. The clock of a stream S maps every stream to
   its last call that certainly ends before the next call of S.
2. An event stores the clock of the stream that recorded it. A stream that waits for the event merges that clock into
   its own.
3. The host queues work on streams. This work comes after everything that the host did or waited for earlier. The host
   itself waits for a stream only explicitly.
4. A launch starts work after the earlier calls of its stream. The work then runs concurrently with everything, until a
   stream waits for it. A wait for a launch ends no other launch, not even an earlier launch of the same group. (NCCL
   would run them in order, gloo need not.)
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, field

from bitproof.harness.operators.row import Launch, Wait

Key = Hashable
Stream = Hashable

NEVER_FREED = float("inf")
COMPUTE: Stream = 0
"""The number of the stream on which a graph is called, as in torch's own graphs."""
HOST: Stream = "host"


@dataclass(frozen=True)
class Race:
    """Two calls that use the same memory without an order between them.

    - `first`: the earlier call.
    - `does`: a sentence about the race, with the placeholder `{who}` for the name of the later call.
    - `key`: the memory.
    - `work`: if `first` is a launch, the entry `launch` of its operator's row; None for any other call.
    - `is_freed`: whether the memory was freed before the wait for `first`.
    """

    first: Hashable
    does: str
    key: Key
    work: Launch | None = None
    is_freed: bool = False

    def describe(self, who: object) -> str:
        """Return the race as a sentence. `who` is the name of the later call."""
        return self.does.format(who=who)


Clock = dict[Stream, int]


@dataclass
class _Work:
    """The part of a launched operator's work that fills a single result of the operator.

    - `launched`, `name`: the time and the name of the launch.
    - `rule`: the entry `launch` of the operator's row.
    - `fills`: the memory of this result.
    - `takes`: the memory that the work reads.
    - `filled`: the waits after which the result is complete, as pairs of the waiting stream and its clock.
    - `taken`: the waits after which the work has finished reading, in the same form.
    """

    launched: float
    name: Hashable
    rule: Launch
    fills: frozenset[Key]
    takes: frozenset[Key]
    filled: list[tuple[Stream, int]] = field(default_factory=list)
    taken: list[tuple[Stream, int]] = field(default_factory=list)  # shared by the results of a launch


State = dict[Key, list[tuple[_Work, int, int]]]
"""For each piece of memory, the work that uses it, with the lengths of the work's lists `filled` and `taken`."""


@dataclass
class _Uses:
    """The calls that used a piece of memory: the last write, and the last read by each stream since.

    - `owner`: the stream that used the memory first, which counts as the stream that allocated it.
    - `recorded`: the streams for which `Tensor.record_stream` was called.
    """

    owner: Stream
    write: tuple[Stream, int, Hashable] | None = None
    reads: dict[Stream, tuple[int, Hashable]] = field(default_factory=dict)
    recorded: set[Stream] = field(default_factory=set)


class Order:
    """Finds races. The caller reports the calls of a graph in order.

    - `last_use`: the time of the last use of each piece of memory, as the index of a call. NEVER_FREED for memory that
      the graph's caller keeps.
    - `is_single`: whether all calls run on a single stream. Then only launched work, such as a collective, can race.
    """

    def __init__(self, last_use: Mapping[Key, float], *, is_single: bool = True) -> None:
        self._last_use = last_use
        self._is_single = is_single
        self._clocks: dict[Stream, Clock] = {COMPUTE: {}}
        self._events: dict[Hashable, Clock] = {}
        self._uses: dict[Key, _Uses] = {}
        self.open: dict[Key, list[_Work]] = {}
        """For each piece of memory, the work that uses it and for which some stream may not have waited."""
        self.freed: dict[Key, Hashable] = {}
        """For each piece of memory that was freed, the call that freed it."""

    # -- calls ------------------------------------------------------------------------------------------

    def call(self, name: Hashable, reads: Collection[Key], writes: Collection[Key], stream: Stream) -> list[Race]:
        """Report a call on `stream` that reads the memory `reads` and writes the memory `writes`. Returns its races."""
        if self._is_single:
            return self.races(reads, writes)
        seq = self._tick(stream)
        used = {*reads, *writes}
        is_open = not (self.open.keys().isdisjoint(used) and self.freed.keys().isdisjoint(used))
        found = self.races(reads, writes, stream) if is_open else []
        clock = self._clocks[stream]
        for key in used:
            uses = self._uses.get(key)
            if uses is None:
                uses = self._uses[key] = _Uses(stream)
            is_write = key in writes
            # Any use must come after another stream's write; a write must also come after other streams' reads.
            earlier = [(*uses.write, "writes")] if uses.write and uses.write[0] != stream else []
            earlier += [(other, *read, "reads") for other, read in uses.reads.items() if is_write]
            for other, at, first, did in earlier:
                if other != stream and clock.get(other, -1) < at:
                    does = "writes" if is_write else "reads"
                    text = f"{{who}} {does}, {_on(stream)}, what `{first}` {did} {_on(other)}, and nothing orders them"
                    found.append(Race(first, text, key))
            if is_write:
                # Calls that are ordered after this write are ordered after the earlier reads, too, so these can be
                # forgotten.
                uses.write, uses.reads = (stream, seq, name), {}
            else:
                uses.reads[stream] = seq, name
        return found

    def call_of_one(self, reads: Collection[Key], writes: Collection[Key], stream: Stream) -> list[Race]:
        """Report a call as `call` does, but faster. Returns its races.

        In the whole graph, only `stream` and launched work may use the memory of the call.
        """
        clock = self._clocks[stream]
        clock[stream] = clock.get(stream, 0) + 1
        for key in (*reads, *writes):
            if key in self.open or key in self.freed:
                # One such piece is enough: `races` looks at all of them.
                return self.races(reads, writes, stream)
        return []

    def races(self, reads: Collection[Key], writes: Collection[Key], stream: Stream = COMPUTE) -> list[Race]:
        """Return the races between a call on `stream` and launched work that uses the same memory.

        Work for which `stream` has waited does not race. Uses of freed memory are returned as races, too. There is at
        most one race per launch and kind of access.
        """
        found: dict[tuple[float, str], Race] = {}
        late = "before anything waits for it"
        # A call that reads and writes the same memory has one race there, as a write.
        for key in (*writes, *(key for key in reads if key not in writes)):
            is_write = key in writes
            for work in self.open.get(key, ()):
                text = None
                if key in work.fills:
                    if not self._is_behind(work.filled, stream):
                        text = f"{{who}} {'writes' if is_write else 'reads'} what `{work.name}` brings, {late}"
                elif is_write and not self._is_behind(work.taken, stream):
                    text = f"{{who}} writes what `{work.name}` {work.rule.takes}, {late}"
                if text is not None:
                    found.setdefault((work.launched, text), Race(work.name, text, key, work.rule))
            if (who := self.freed.get(key)) is not None:
                text = f"{{who}} uses memory that `{who}` has let go of"
                # Before all launches in the sorted result.
                found.setdefault((-1, text), Race(who, text, key))
        return [found[place] for place in sorted(found)]

    # -- work -------------------------------------------------------------------------------------------

    def launch(
        self, name: Hashable, time: float, rule: Launch, results: Iterable[Iterable[Key]], takes: Iterable[Key]
    ) -> None:
        """Report a launch that fills `results` and reads the memory `takes`.

        `rule` is the entry `launch` of the operator's row. Each result is given as its pieces of memory, and needs its
        own wait before it may be read. After a wait for any result, the launch has finished reading.
        """
        taken, ended = frozenset(takes), list[tuple[Stream, int]]()
        for result in results:
            # All results share the list `ended`, and each has its own list `filled`.
            work = _Work(time, name, rule, frozenset(result), taken, taken=ended)
            for key in work.fills | taken:
                self.open.setdefault(key, []).append(work)

    def wait(self, rule: Wait, awaited: Iterable[Key], time: float, stream: Stream = COMPUTE) -> list[Race]:
        """Report that a stream waits until launched work has filled the memory `awaited`. Returns the races found.

        - `rule`: the kind of work that this wait ends, from the table of operators. Other work is not ended.
        - `awaited`: the memory. Work that fills no memory, such as a send, is ended by a wait for the memory that it
          reads.

        There is a race if memory that the work reads was freed before this wait.
        """
        # A new tick: a stream that waited for earlier calls of this stream is not behind this wait.
        now = (stream, 0 if self._is_single else self._tick(stream))
        found = []
        filling = [work for key in awaited for work in self.open.get(key, ()) if _is_ended_by(work, key)]
        # A launch may fill several of the awaited keys; by `id`, since works with equal fields are different
        # launches.
        for work in {id(work): work for work in filling}.values():
            if work.rule.work is not rule.work:
                continue
            # Memory is checked at the first wait only: after it the launch has read everything.
            is_first = not work.filled
            work.filled.append(now)
            work.taken.append(now)
            if self._is_single:
                self._forget(work)
            if is_first and work.rule.holds_source:
                found += _freed_before_wait(work, time, self._last_use)
        return found

    def unfinished(self, keys: Iterable[Key]) -> list[Race]:
        """Return the races between the graph and its caller, in memory that outlives the graph.

        Such a race is a write or read for which nothing has waited.
        """
        found: dict[tuple[Hashable, str], Race] = {}

        def add(first: Hashable, does: str, key: Key, work: Launch | None = None) -> None:
            found.setdefault((first, does), Race(first, f"the step ends while `{first}` {does}", key, work))

        for key in keys:
            for work in self.open.get(key, ()):
                fills = key in work.fills
                if not self._is_behind(work.filled if fills else work.taken, COMPUTE):
                    does, may = ("fills", "read") if fills else (work.rule.takes, "write")
                    add(work.name, f"{does} memory that its caller may {may}", key, work.rule)
            uses = self._uses.get(key)
            if uses is None or self._is_single:
                continue
            clock = self._clock(COMPUTE)
            # What follows the step is called on COMPUTE, so only work on other streams may still run.
            last = [(stream, *read, "reads", "write") for stream, read in uses.reads.items()]
            last += [(*uses.write, "writes", "read")] if uses.write else []
            for stream, at, first, did, may in last:
                if stream not in (COMPUTE, HOST) and clock.get(stream, -1) < at:
                    add(first, f"{did}, {_on(stream)}, memory that its caller may {may}", key)
        return list(found.values())

    def filling(self, keys: Iterable[Key]) -> list[Hashable]:
        """Return the names of launches that fill these pieces of memory and for which nothing has waited."""
        found = (work for key in keys for work in self.open.get(key, ()) if _is_ended_by(work, key) and not work.filled)
        return list(dict.fromkeys(work.name for work in found))

    # -- choices ----------------------------------------------------------------------------------------

    def state(self) -> State:
        """Return the unfinished work, as an argument for `go_back` after a conditional branch."""
        return {key: [(work, len(work.filled), len(work.taken)) for work in works] for key, works in self.open.items()}

    def go_back(self, before: State) -> dict[int, _Work]:
        """Undo the waits of a conditional branch, since it may not run. `before` is the `state` before the branch.

        Launches of the branch stay. Returns the earlier work for which the branch waited, by its `id`.
        """
        ended: dict[int, _Work] = {}
        for key, works in before.items():
            old = {id(work) for work, _, _ in works}
            for work, num_filled, num_taken in works:
                if len(work.filled) > num_filled:
                    ended[id(work)] = work
                # The lists only grow, so their old lengths are enough to restore them.
                del work.filled[num_filled:], work.taken[num_taken:]
            # Also restores entries that `_forget` removed in the branch.
            self.open[key] = [work for work, _, _ in works] + [x for x in self.open.get(key, ()) if id(x) not in old]
        return ended

    def end(self, works: Iterable[_Work], stream: Stream) -> None:
        """Report that a stream has waited for work, because each branch of a condition waits for it."""
        now = (stream, 0 if self._is_single else self._tick(stream))
        for work in works:
            work.filled.append(now)
            work.taken.append(now)
            if self._is_single:
                self._forget(work)

    def _forget(self, ended: _Work) -> None:
        # The results of a launch share `taken`: a wait for any of them ends the reading, so no entry for memory that
        # was only read is left. Entries for other results stay, since each needs its own wait.
        for key in ended.fills | ended.takes:
            left = [
                work
                for work in self.open.get(key, ())
                if not (work is ended or (work.taken is ended.taken and key not in work.fills))
            ]
            if left:
                self.open[key] = left
            else:
                self.open.pop(key, None)

    def is_filling(self, keys: Iterable[Key]) -> bool:
        """Return whether some launch fills any of these pieces of memory, and nothing has waited for it."""
        return any(key in work.fills and not work.filled for key in keys for work in self.open.get(key, ()))

    def touching(self, keys: Iterable[Key]) -> list[float]:
        """Return the times of launches that fill or read these pieces of memory and for which nothing has waited."""
        return sorted({work.launched for key in keys for work in self.open.get(key, ()) if not work.filled})

    # -- streams and lifetimes --------------------------------------------------------------------------

    def record(self, event: Hashable, stream: Stream) -> None:
        """Report that a stream records an event. A wait for the event then waits for all earlier calls of the
        stream."""
        self._events[event] = dict(self._clock(stream))

    def wait_event(self, event: Hashable, stream: Stream) -> None:
        """Report that a stream waits for an event, and so for all calls before the event was recorded.

        An event that was never recorded has no effect.
        """
        self._join(stream, self._events.get(event, {}))

    def wait_stream(self, stream: Stream, other: Stream | None) -> None:
        """Report that `stream` waits for all earlier calls of `other`, or of all streams if `other` is None."""
        # A copy: `_join` may add this stream's clock while the loop runs.
        for each in [*self._clocks] if other is None else [other]:
            self._join(stream, dict(self._clock(each)))

    def keep_for(self, keys: Iterable[Key], stream: Stream) -> None:
        """Report `Tensor.record_stream`: the allocator reuses this memory only after this stream has used it."""
        for key in keys:
            self._uses.setdefault(key, _Uses(COMPUTE)).recorded.add(stream)

    def free(self, keys: Iterable[Key], name: Hashable) -> list[Race]:
        """Report that no call after `name` uses this memory. The stream that allocated it may then reuse it at once.

        Returns the races with uses by other streams.
        """
        found = []
        for key in keys:
            uses = self._uses.pop(key, None)
            if uses is None or self._is_single:
                continue
            clock = self._clock(uses.owner)
            last = [(stream, *read, "reads") for stream, read in uses.reads.items()]
            last += [(*uses.write, "writes")] if uses.write else []
            for stream, at, first, did in last:
                # The owner's own calls come before its reuse, the host's calls have ended, and the allocator waits for
                # streams that `keep_for` recorded.
                is_known = stream in (uses.owner, HOST) or stream in uses.recorded
                if uses.owner != HOST and not is_known and clock.get(stream, -1) < at:
                    text = f"{{who}} is the last to use what `{first}` {did} {_on(stream)}: {_on(uses.owner)} that"
                    found.append(Race(first, f"{text} memory may be used again before `{first}` is done", key))
        return found

    def report_freed(self, keys: Iterable[Key], name: Hashable) -> None:
        """Report that the call `name` freed this memory. `races` returns any later use of it as a race."""
        self.freed |= dict.fromkeys(keys, name)

    def _tick(self, stream: Stream) -> int:
        clock = self._clock(stream)
        # Rule 3: the host queued this call, so it comes after everything that the host has waited for.
        if stream != HOST:
            self._join(stream, self._clock(HOST))
        clock[stream] = clock.get(stream, 0) + 1
        return clock[stream]

    def _clock(self, stream: Stream) -> Clock:
        return self._clocks.setdefault(stream, {})

    def _join(self, stream: Stream, other: Clock) -> None:
        clock = self._clock(stream)
        for each, seq in other.items():
            if clock.get(each, -1) < seq:
                clock[each] = seq

    def _is_behind(self, ended: list[tuple[Stream, int]], stream: Stream) -> bool:
        clock = self._clocks.get(stream, {})
        # The stream itself has waited, or it has waited for a stream after that stream's wait.
        return any(each == stream or clock.get(each, -1) >= at for each, at in ended)


def _is_ended_by(work: _Work, key: Key) -> bool:
    # A send fills no memory. A wait for the sent memory ends it.
    return key in work.fills or (work.rule.awaited_by_source and key in work.takes)


def _freed_before_wait(work: _Work, time: float, last_use: Mapping[Key, float]) -> list[Race]:
    # A piece without a known last use counts as used at the wait.
    gone = [key for key in work.takes if last_use.get(key, time) < time]
    does = f"{{who}} waits for `{work.name}`, which {work.rule.takes} what is not kept until then"
    return [Race(work.name, does, gone[0], work.rule, is_freed=True)] if gone else []


def _on(stream: Stream) -> str:
    return "on the host" if stream == HOST else f"on stream {stream}"
