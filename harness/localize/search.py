"""Find the call to blame for a difference, by replaying both systems up to the first step that differs.

1. A replay of each system logs every call of that step. If an earlier run has logged the step, its log is used.
2. A second replay fetches outputs: those of the blamed call, and of the calls from it to the first differing record.
3. If the blamed call reads a value from an earlier step, another replay runs instead of the second. It logs the calls
   of all steps, to find the call to blame in an earlier step.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from bitproof.harness.compare.bits import ComparedBits
from bitproof.harness.compare.differing_settings import differing_settings
from bitproof.harness.errors import BitproofError
from bitproof.harness.localize.blame import Differing, culprits_in, find_culprit, ready_logs
from bitproof.harness.localize.culprit import Culprit, Link, call_of
from bitproof.harness.localize.differing import differing_digests
from bitproof.harness.localize.exchange.verifier import MAX_CULPRITS, Verifier
from bitproof.harness.localize.expected_found import expected_and_found
from bitproof.harness.localize.logs.calls import Call, returns_only_inputs
from bitproof.harness.localize.logs.replay import (
    RECORD,
    SPARE_BYTES,
    Replay,
    ValueSite,
    archive_of,
    archives_of,
    copy_spare_values,
    name_of_value,
    read_log,
    read_types,
    step_of,
)
from bitproof.harness.records import ROLES, Divergence, Key, Recording, Role, Sample, TensorDifference

CompareBits = Callable[[Mapping[Role, Path], str], ComparedBits]
"""Compares the two values that have this name: one in the archive of each system."""

RunReplay = Callable[[Role, int, Path, Replay], str | None]
"""Runs the replay of a system that has this number, and writes its archives into a folder.

Returns the digest of the record that the replay kept, None if it kept none.
"""

Logs = Mapping[Role, list[list[Call]]]
"""For each side, the calls of each rank."""

ALL_STEPS = 7
"""The number of the replay that logs all steps: a search for noise uses numbers 3 to 6."""


class UnrepeatableError(BitproofError):
    """A replay did not reproduce its recording: the system differs from itself."""

    def __init__(self, role: Role, key: Key) -> None:
        super().__init__(f"a replay of the {role} did not reproduce its recording")
        self.role = role
        self.key = key


@dataclass
class Search:
    """A search for the cause of the first difference of two recordings, by running both systems again.

    - `folder`: the folder into which the replays write their values.
    - `remarks`: sentences for the report. The search adds to them.
    - `is_logged`: whether earlier runs, equal to the recordings, have logged the step already.
    - `shows_bits`: whether to fetch the differing bits of tensors, too.
    - `verifies`: whether to verify the blamed call by exchanging its values.
    """

    recordings: dict[Role, Recording]
    folder: Path
    num_ranks: int
    run_replay: RunReplay
    compare_bits: CompareBits
    remarks: list[str] = field(default_factory=list, kw_only=True)
    is_logged: bool = field(default=False, kw_only=True)
    shows_bits: bool = field(default=True, kw_only=True)
    verifies: bool = field(default=False, kw_only=True)

    def explain(self, first: Divergence) -> Divergence:
        """Return the divergence `first` with its differing bits and, if found, the call to blame filled in.

        If only a later record has a call to blame, returns that record's divergence. Raises UnrepeatableError if a
        replay differs from its recording.
        """
        key = Key(first.step, first.kind, first.name, first.rank)
        # The replay must reproduce its recording: otherwise the logged calls do not explain the recorded difference.
        for role in ROLES if not self.is_logged else ():
            replay = Replay(step=key.step, log=True, record=key, spare=SPARE_BYTES if self.verifies else 0)
            if self._replay(role, 1, replay) != self._digest(role, key):
                raise UnrepeatableError(role, key)
        # Elements can be compared only if dtype and shape agree.
        is_of_one_type = first.tensor.reference_type == first.tensor.candidate_type
        if self.shows_bits and is_of_one_type:
            with self._bits_may_fail("the first differing tensor", first.rank):
                first = self._with_bits(first)
        logs = {role: self._logs(role) for role in ROLES}
        # The search begins with the first record, and continues with later ones if no call explains it.
        differing = differing_digests(self.recordings["reference"], self.recordings["candidate"], key.step)
        first = replace(first, holds=held_as(self.recordings["reference"], self.recordings["candidate"], key))
        pair = self._digest("reference", key), self._digest("candidate", key)
        ready = ready_logs(logs["reference"], logs["candidate"])
        culprits = culprits_in(ready, differing, (key.rank, pair), MAX_CULPRITS)
        if not culprits:
            return first
        culprit = culprits[0]
        verification = None
        manifests = [self.recordings[role].manifest.ranks or () for role in ROLES]
        settings = differing_settings(manifests[0], manifests[1], key.step)
        # The verifier may return another culprit than the likeliest: the first that exchanges confirm.
        if self.verifies:
            types = self._types()
            verifier = Verifier(self.recordings, self.folder, key.step, logs, self.run_replay, ready, settings, types)
            culprit, verification = verifier.verify(*culprits)
        if (
            culprit.how == "inherits"
            and (buffer := self._buffer_read(culprit, logs["candidate"], key.step)) is not None
        ):
            self.remarks.append(buffer)
        # No call leads to the first differing record: describe the record to which the blamed call leads.
        if culprit.explains is not None and culprit.explains != (key.rank, *pair):
            first = self._later_divergence(key, culprit.explains)
        # The blamed call only reads a stale value: its cause is a call of an earlier step.
        if (
            culprit.how == "inherits"
            and key.step
            and self.shows_bits
            and (left := self._find_in_earlier_steps(key, differing, pair)) is not None
        ):
            culprit, logs, step = left
            self.remarks.append(f"the call to blame is in step {step}: step {key.step} reads its output")
            return replace(first, call=call_of(culprit))
        changed: list[TensorDifference | None] = []
        with self._bits_may_fail(f"the output of {culprit.call}", culprit.rank):
            changed = self._changed(culprit, logs, key.step) if self.shows_bits else []
        call = call_of(culprit, changed=changed)
        expected, found = expected_and_found(culprit, ready, call.output, settings, key.step)
        return replace(first, call=replace(call, expected=expected, found=found, verification=verification))

    def _find_in_earlier_steps(
        self, key: Key, differing: Differing, pair: tuple[str, str]
    ) -> tuple[Culprit, dict[Role, list[list[Call]]], int] | None:
        """Return three values: the call to blame in an earlier step than that of `key`, the logs of all steps, and its
        step.

        None if no such call explains the difference.
        """
        if self.recordings["candidate"].manifest.case.get("resume_at"):
            # Its earlier steps ran in other processes, which left no logs.
            return None
        for role in ROLES:
            self._replay(role, ALL_STEPS, Replay(step=key.step, log=True, every_step=True))
        logs = {role: self._logs(role, ALL_STEPS) for role in ROLES}
        culprit = find_culprit(logs["reference"], logs["candidate"], differing, (key.rank, pair))
        if culprit is None:
            return None
        side: Role = "reference" if culprit.candidate is None else "candidate"
        step, _ = step_of(archive_of(self._archives(side, ALL_STEPS), culprit.rank), culprit.index)
        return (culprit, logs, step) if step < key.step else None

    def _buffer_read(self, culprit: Culprit, logs: Sequence[Sequence[Call]], step: int) -> str | None:
        """Return a sentence about a buffer that the blamed call reads and that already differed when the step began.

        The call may read it directly, or through views and copies. None if there is no such buffer.
        """
        if culprit.candidate is None:
            return None
        calls, pending, read = logs[culprit.rank], [culprit.candidate], set[str]()
        # Collect the digests of everything that the call reads, also before the views and copies between.
        while pending:
            call = calls[pending.pop()]
            read |= {*call.inputs}
            left = [number for number in call.producers if number is not None]
            pending += [number for number in left if calls[number].view or returns_only_inputs(calls[number])]
        theirs, own = (self.recordings[role].records_at(culprit.rank, step) for role in ROLES)
        for key, record in own.items():
            # The name of such a record is the buffer's and, after "@", the moment of the step at which it was recorded.
            name, _, _ = key.name.rpartition("@")
            if key.kind == "buffer" and name and record.digest in read:
                if key not in theirs:
                    return f"the call to blame reads buffer `{name}`, which only the candidate has"
                if theirs[key].digest != record.digest:
                    return f"the call to blame reads buffer `{name}`, which differed before the step's first forward"
        return None

    def _later_divergence(self, first: Key, explains: tuple[int, str, str]) -> Divergence:
        """Return the divergence to report if the blamed call leads only to a differing record after the first.

        `explains` has the rank and the digests of the later record. A remark names both records.
        """
        rank, *pair = explains
        sides = [self.recordings[role].records_at(rank, first.step) for role in ROLES]
        # The culprit knows the record by its rank and digests only. Another record with both digests
        # would serve as well.
        found = next(key for key in sides[0] if [side[key].digest for side in sides if key in side] == pair)
        self.remarks.append(
            f"no wrong call leads to the first difference, {_describe(first)}; shown is the first difference that a "
            f"wrong call leads to, {_describe(found)}"
        )
        return Divergence(
            **found._asdict(), holds=held_as(self.recordings["reference"], self.recordings["candidate"], found)
        )

    @contextmanager
    def _bits_may_fail(self, whose: str, rank: int) -> Iterator[None]:
        """Context in which an error while bits are fetched becomes a remark: the cause is known without the bits."""
        try:
            yield
        except BitproofError as error:
            text = f"the bits of {whose} on rank {rank} could not be fetched; the verdict stands, and so does the cause"
            self.remarks.append(f"{text}: {error.what}")

    def _with_bits(self, first: Divergence) -> Divergence:
        """Return the divergence `first` with the differing bits of its tensor filled in.

        They are taken from each system's first replay. Unchanged if the two tensors differ in dtype or shape.
        """
        bits, _ = self._bits(1, first.rank, RECORD)
        if bits is None:
            return first
        types = {name: getattr(first.tensor, name) for name in ("reference_type", "candidate_type")}
        return replace(first, tensor=replace(bits, **types))

    def _digest(self, role: Role, key: Key) -> str:
        return self.recordings[role].records_at(key.rank, key.step)[key].digest

    def _replay(self, role: Role, number: int, replay: Replay) -> str | None:
        return self.run_replay(role, number, self._archives(role, number), replay)

    def _archives(self, role: Role, number: int) -> Path:
        return archives_of(self.folder, role, number)

    def _logs(self, role: Role, number: int = 1) -> list[list[Call]]:
        """Return the calls of a system's `number`-th replay, rank by rank."""
        return [read_log(archive_of(self._archives(role, number), rank)) for rank in range(self.num_ranks)]

    def _types(self) -> dict[str, str]:
        """Return the dtype and shape of each digest in the logs of the first replays."""
        archives = [archive_of(self._archives(role, 1), rank) for role in ROLES for rank in range(self.num_ranks)]
        return {digest: type_ for archive in archives for digest, type_ in read_types(archive).items()}

    def _changed(self, culprit: Culprit, logs: Logs, step: int) -> list[TensorDifference | None]:
        """Return the difference in the output of each call in the chain from the blamed call to the reported record.

        An entry is None if the call has no match, if the outputs are equal, or if the output did not recur when its
        system ran again. The list is empty if no output in the chain differs.
        """
        # An output that is not reproduced need not contradict the verdict: values that no record shows may vary between
        # runs, for example rows that no call reads.
        links = culprit.chain or (Link(culprit.call, culprit.rank, 0, culprit.reference, culprit.candidate),)
        outputs = [_first_difference(link, logs) for link in links]
        if not any(outputs):
            return []
        for side, role in enumerate(ROLES):
            sites = tuple(output.sites[side] for output in outputs if output)
            # A run that logged a small step has kept these outputs already.
            if not self.is_logged or not copy_spare_values(self._archives(role, 1), self._archives(role, 2), sites):
                self._replay(role, 2, Replay(step=step, values=sites))
        # Only links with a difference have a requested value, so these are counted, and not the links.
        numbers = itertools.count()
        return [output and self._bits_again(output, next(numbers)) for output in outputs]

    def _bits_again(self, output: _ChangedOutput, number: int) -> TensorDifference | None:
        """Return the difference in the `number`-th requested output; None if a digest is not as in the logs."""
        bits, digests = self._bits(2, output.sites[0].rank, name_of_value(number))
        return bits if tuple(digests) == output.digests else None

    def _bits(self, number: int, rank: int, name: str) -> tuple[TensorDifference | None, list[str]]:
        """Return a pair for two values of the same name, one in each system's archive: their difference and their
        digests.

        `number` is the number of the replay whose archives are read. The difference is None if dtypes or shapes differ.
        """
        answer = self.compare_bits({role: archive_of(self._archives(role, number), rank) for role in ROLES}, name)
        bits = answer.difference
        if bits is None:
            return None, list(answer.digests)
        found = TensorDifference(
            elements_differing=bits.elements_differing,
            elements=bits.elements,
            max_ulp=bits.max_ulp,
            reference_bits=bits.reference_bits,
            candidate_bits=bits.candidate_bits,
            histogram=bits.histogram,
            samples=[Sample(list(index), *pair) for index, *pair in bits.samples],
        )
        return found, list(answer.digests)


class _ChangedOutput(NamedTuple):
    """An output that differs between two matching calls: its two sites and two digests, the reference's first."""

    sites: tuple[ValueSite, ValueSite]
    digests: tuple[str, str]


def _first_difference(link: Link, logs: Logs) -> _ChangedOutput | None:
    """Return the first output in which a link's two calls differ; None if they agree, or if a system lacks the call."""
    if link.reference is None or link.candidate is None:
        return None
    first, second = logs["reference"][link.rank][link.reference], logs["candidate"][link.rank][link.candidate]
    for position, digests in enumerate(zip(first.outputs, second.outputs, strict=False)):
        if digests[0] != digests[1]:
            sites = [ValueSite(link.rank, index, position) for index in (link.reference, link.candidate)]
            return _ChangedOutput((sites[0], sites[1]), digests)
    return None


def _describe(key: Key) -> str:
    return f"step {key.step}, rank {key.rank}, {key.kind} {key.name}"


def held_as(reference: Recording, candidate: Recording, key: Key) -> str | None:
    """Return the kind and name of the reference's record that has exactly the bits of the candidate's record `key`.

    For example, "grad b" if two gradients were exchanged and `key` is grad a. Only records of the same kind, step and
    rank as `key` are compared. Returns None unless exactly one of these has the same bits.
    """
    digest = candidate.records_at(key.rank, key.step)[key].digest
    found = [
        other.name
        for other, record in reference.records_at(key.rank, key.step).items()
        if other.kind == key.kind and record.digest == digest
    ]
    return f"{key.kind} {found[0]}" if len(found) == 1 else None
