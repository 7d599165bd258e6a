"""Verify a cause by exchange: run the step again with the other system's value where the blamed call is wrong.

Example: `mul` scales by 0.25, and by 0.125 in the reference. With the reference's output of `mul`, all 44 tensors of
the step are equal. With the candidate's, the reference computes the candidate's 44 tensors. So the cause is verified.

1. The candidate's step runs again, and the reference's value replaces the output of the blamed call. If all records
   then equal the reference's, nothing else is wrong.
2. Otherwise the next call to blame is searched in the log of that run, and exchanged as well. It belongs to the same
   cause, such as a backward call, or is another cause. At most `MAX_ROUNDS` runs.
3. If there are several causes, the step runs without each of them. A cause that is not needed is dropped. If a
   cause made no tensor equal, the step also runs with each cause alone, since a single cause may suffice.
4. The reference's step runs with the candidate's values at the same calls. If it then computes the candidate's records,
   these values explain the whole difference.

A call is no cause if it reads a value that the reference does not have: an earlier call is wrong. Up to the exchange,
each run must repeat the values of the previous run; otherwise nothing is verified.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from bitproof.harness.compare.differing_settings import DifferingSetting
from bitproof.harness.errors import BitproofError
from bitproof.harness.localize.blame import culprits_in, ready_logs
from bitproof.harness.localize.culprit import HOW, Culprit
from bitproof.harness.localize.differing import differing_digests
from bitproof.harness.localize.exchange.exchange_plan import ExchangePlan, WrongCall, plan_of
from bitproof.harness.localize.exchange.misreads import ways_of
from bitproof.harness.localize.exchange.reader_exchanges import Swap
from bitproof.harness.localize.exchange.verified_cause import Cause
from bitproof.harness.localize.exchange.wrong_arguments import WrongArguments
from bitproof.harness.localize.exchange.wrong_input import extra_before, wrong_input
from bitproof.harness.localize.logs.calls import Call
from bitproof.harness.localize.logs.candidate_log import CandidateLog
from bitproof.harness.localize.logs.replay import (
    OTHER_TYPE,
    UNSTEADY,
    Exchanged,
    Replay,
    ValueExchange,
    ValueSite,
    archive_of,
    archives_of,
    copy_spare_values,
    name_of_value,
    read_exchanged,
    read_log,
    read_records,
    read_types,
    value_at,
)
from bitproof.harness.records import Key, OtherCause, Recording, Role, Verification

MAX_ROUNDS = 8
"""The maximum number of runs with exchanged values that search for causes."""

MAX_CULPRITS = 6
"""The maximum number of calls that are tried in turn, until a call can be a cause."""

MAX_CALLS_SHOWN = 6

_FIRST_NUMBER = 20
"""The number of the first of these replays; other replays of a search have smaller numbers."""

Differing = Mapping[int, Sequence[tuple[str, str]]]


@dataclass
class ExchangedRun:
    """The result of a run with exchanged values: its calls, its records, and the outcome of each exchange.

    `ready` is the result of `ready_logs` for these calls; empty until a search needs it.
    """

    calls: Sequence[Sequence[Call]]
    recording: Recording
    made: Mapping[ValueSite, Exchanged]
    ready: Sequence[CandidateLog] = ()


@dataclass
class Verifier:
    """Verifies the causes of a difference at `step`, by running the systems with each other's values.

    - `logs`: each system's calls, by rank, of its first replay.
    - `folder`: the archives of these replays.
    - `ready`: the result of `ready_logs` for `logs`, if known.
    - `settings`: the optimizer settings that differ.
    - `types`: the dtype and shape of each digest in `logs`, as far as they are known.
    """

    recordings: Mapping[Role, Recording]
    folder: Path
    step: int
    logs: Mapping[Role, Sequence[Sequence[Call]]]
    run_replay: Callable[[Role, int, Path, Replay], str | None]
    ready: Sequence[CandidateLog] = ()
    settings: Sequence[DifferingSetting] = ()
    types: dict[str, str] = field(default_factory=dict)
    _number: int = field(default=_FIRST_NUMBER, init=False)
    _values: dict[Role, dict[ValueSite, tuple[Path, str]]] = field(default_factory=dict, init=False)
    _runs: int = field(default=0, init=False)
    _outputs: dict[Role, dict[int, dict[str, ValueSite]]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.ready = self.ready or ready_logs(self.logs["reference"], self.logs["candidate"])
        self._known = [log.reference for log in self.ready]
        self._keys = {role: self._digests(recording) for role, recording in self.recordings.items()}
        self._arguments = WrongArguments(self.settings, self.step)

    def verify(self, culprit: Culprit, *others: Culprit) -> tuple[Culprit, Verification]:
        """Search for the cause and verify it. Returns a pair: the cause, and its verification.

        The cause is the first call of `culprit` and `others` that can be a cause. If an exchange at a call that is
        found later is enough to make the step right, the cause is that later call.
        """
        causes, reason, run = list[Cause](), "", self._first_run()
        try:
            causes, reason, run = self._search([culprit, *others])
            # Without a right step there is nothing to compare: a cause that is not needed could not be recognized.
            if not self._wrong(run.recording):
                causes, reason = self._needed(causes, run)
                if len(causes) == 1:  # a single cause accounts for all, also if its first exchange spoiled right values
                    causes[0].accounts = len(self._wrong(self.recordings["candidate"]))
            reverse = None if self._wrong(run.recording) else self._reversed(causes)
        except BitproofError as error:
            reason, reverse = f"a run with exchanged values failed: {error.what}", None
        found, verification = culprit, self._verification(causes, run, reason, reverse)
        if causes and verification.remaining == 0 and causes[0].culprit is not culprit:
            # This cause was found in the log of a run with exchanged values. The first run, which the report describes,
            # need not have the same call at this index.
            found = causes[0].culprit
            known = self.logs["candidate" if found.candidate is not None else "reference"][found.rank]
            if found.index >= len(known) or known[found.index].operator != found.call.operator:
                # A call that the first run does not make.
                reason = f"with exchanged values, the cause is {describe_cause(found)}"
                return culprit, replace(verification, status="in part", reason=reason)
            # The chain's indices are those of a run with exchanged values, so it is dropped.
            found = replace(found, explains=culprit.explains, chain=())
        return found, verification

    def _first_run(self) -> ExchangedRun:
        return ExchangedRun(self.logs["candidate"], self.recordings["candidate"], {}, self.ready)

    def _search(self, culprits: Sequence[Culprit]) -> tuple[list[Cause], str, ExchangedRun]:
        """Exchange the values of the causes in turn, until the step is right or no cause is left.

        `culprits` are tried in order. Returns three values: the causes, the reason why the search ended early (or ""),
        and the last valid run.
        """
        causes, refused, blocked = list[Cause](), "", set[ValueSite]()
        run, pending, passed = self._first_run(), [*culprits], list[Culprit]()
        # `refused` is the first reason, since the last valid run, why a call cannot be a cause. It is reported if no
        # later call can.
        while pending:
            if self._runs == MAX_ROUNDS:
                return causes, f"after {MAX_ROUNDS} runs with exchanged values something is still wrong", run
            current = pending.pop(0)
            logs, differing = run.ready, self._pairs(run.recording)
            planned = plan_of(current, logs, differing, blocked, self._arguments, self.types)
            reason = wrong_input(current, logs) or self._exchanged_already(current, planned, causes, run)
            if not reason and not any(group.is_lead for group in planned.groups):
                reason = refused or _joined(planned.problems)
            if reason:
                refused = refused or reason
                pending += [each for each in extra_before(current, logs) if each not in passed]
                passed.append(current)
                continue
            # Some values may have another dtype or shape: plan again, with these sites blocked.
            unlike = [made for made in self._of_other_type(planned, run) if made.site not in blocked]
            if unlike:
                blocked |= {made.site for made in unlike}
                refused = f"{_where(unlike[0], run)} cannot be exchanged: {unlike[0].not_done}"
                pending[:0] = [current]
                continue
            tried, cause, groups = self._with_cause_of(current, planned, causes, logs)
            after = self._exchanged("candidate", _swaps(tried, "candidate"))
            before, left = self._wrong(run.recording), self._wrong(after.recording)
            trouble = self._trouble(planned, run, after, tried)
            # The log did not show a type that the run has found to be another one.
            others = {made.site for made in after.made.values() if OTHER_TYPE in made.not_done} - blocked
            if others or trouble:
                # The run is invalid, so the cause gets back the exchanges that it had before.
                blocked |= others
                cause.groups, refused = groups, trouble
                pending[:0] = [current] if others else []
                continue
            causes, run, refused, passed = tried, after, "", []
            cause.accounts += len(before - left)
            if not left:
                return causes, "", run
            # Something still differs: search the log of this run for the next call to blame.
            run.ready = ready_logs(self._known, run.calls)
            pending = self.blamed(run.recording, run.ready)
        return causes, refused or "no call explains what still differs", run

    def _of_other_type(self, planned: ExchangePlan, run: ExchangedRun) -> list[Exchanged]:
        """Return the outcomes of the exchanges that cannot be made, because the value in `run` has another dtype or
        shape.
        """
        found = list[Exchanged]()
        for swap in (each for group in planned.groups for each in group.candidate):
            held = value_at(run.calls[swap.site.rank][swap.site.call], swap.site)
            types = self.types.get(held or ""), self.types.get(swap.wanted)
            if None not in types and types[0] != types[1]:
                found.append(Exchanged(swap.site, False, f"{types[0]} {OTHER_TYPE} {types[1]}"))
        return found

    def _with_cause_of(
        self, culprit: Culprit, planned: ExchangePlan, causes: Sequence[Cause], logs: Sequence[CandidateLog]
    ) -> tuple[list[Cause], Cause, list[WrongCall]]:
        """Add a culprit, a call to blame, to the causes found so far, and return three values:

        - The new list of causes. The culprit is part of an earlier cause if that has the same defect, else a new cause.
        - The cause that contains the culprit, with the exchanges in `planned`.
        - The exchanges that this cause had earlier, to undo the change.
        """
        wrong = self._arguments.of_culprit(culprit, logs)
        reads, ways = _read_by(culprit, logs[culprit.rank]), ways_of(culprit, logs)
        cause = next((each for each in causes if each.has(culprit, wrong, reads, ways)), None)
        tried = [*causes] if cause else [*causes, Cause(culprit, wrong, ways)]
        cause = cause or tried[-1]
        # A site that an earlier cause exchanges is not exchanged again, except for the blamed call itself.
        known = {swap.site for each in tried for group in each.groups for swap in group.candidate}
        groups = [*cause.groups]
        cause.groups += [group for group in planned.groups if group.is_lead or group.candidate[0].site not in known]
        return tried, cause, groups

    def blamed(self, recording: Recording, logs: Sequence[CandidateLog]) -> list[Culprit]:
        """Return the calls that may be to blame for the differences of a candidate's recording, the likeliest first."""
        pairs = self._pairs(recording)
        rank = next(iter(pairs), None)
        return [] if rank is None else culprits_in(logs, pairs, (rank, pairs[rank][0]), MAX_CULPRITS)

    def _exchanged_already(
        self, culprit: Culprit, planned: ExchangePlan, causes: Sequence[Cause], run: ExchangedRun
    ) -> str:
        """Return an error text if a run has exchanged all planned values of the blamed call already.

        Returns "" if at least one of these values is new.
        """
        leads = [swap.site for group in planned.groups if group.is_lead for swap in group.candidate]
        is_done = bool(leads) and all(site in run.made and run.made[site].done for site in leads)
        return f"{culprit.call} is still wrong, though its values were exchanged" if is_done else ""

    def _trouble(
        self, planned: ExchangePlan, before: ExchangedRun, after: ExchangedRun, causes: Sequence[Cause]
    ) -> str:
        """Return the reason why the run `after` is invalid: an exchange failed, or an earlier call did not repeat.

        Returns "" if the run is valid.
        """
        leads = [swap for group in planned.groups if group.is_lead for swap in group.candidate]
        # Exchanges of further calls with the same defect may fail: they are conditional. Those of the lead must not.
        failed = [made for swap in leads if not (made := after.made[swap.site]).done]
        if unsteady := [made for made in failed if made.not_done.startswith(UNSTEADY)]:
            # The candidate's own value did not repeat. With more text after it, it is the inserted
            # value of the reference.
            side = "candidate" if unsteady[0].not_done == UNSTEADY else "reference"
            return f"the {side} differs from itself: {_where(unsteady[0], before)}: {unsteady[0].not_done}"
        if len(failed) == len(leads):
            return f"{_where(failed[0], before)} cannot be exchanged: {failed[0].not_done}"
        exchanged = {(swap.site.rank, swap.site.call) for swap in _swaps(causes, "candidate")}
        for rank, (calls, again) in enumerate(zip(before.calls, after.calls, strict=True)):
            parted = unrepeated(calls, again, {call for on, call in exchanged if on == rank})
            if parted is not None:
                call = (calls if parted < len(calls) else again)[parted]
                return (
                    f"the candidate differs from itself: {call} on rank {rank} came out otherwise before any exchange"
                )
        return ""

    def _needed(self, causes: list[Cause], right: ExchangedRun) -> tuple[list[Cause], str]:
        """Return the causes that are needed, and the reason why one of these is not the first wrong call ("" if all
        are).

        `right` is the run with the exchanges of all causes.

        A cause is dropped if the step is right without its exchanges, and the calls of the other causes read the same
        values then. Otherwise their exchanges only hide it: dropout with another `p` draws a wrong mask and divides by
        a wrong number, and the right quotient hides the wrong mask.

        The call of a cause that is kept must read right values in that run, too: in the run in which it was found, an
        exchange that was dropped since may have put them there.
        """
        if len(causes) == 1:
            return causes, ""
        # An exchange that made no tensor right may have spoiled a right value, which a later exchange mends.
        useless, refused = [cause for cause in causes if not cause.accounts], ""
        if useless and (single := self._sufficient(causes)):
            return [single], ""
        if len(useless) > 1:
            _, causes = self._without(useless, causes, right)
        # One by one: of two causes that each suffice, one must stay.
        for cause in [*causes]:
            run, rest = self._without([cause], causes, right)
            if cause in rest:
                refused = refused or wrong_input(cause.culprit, run.ready or ready_logs(self._known, run.calls))
            causes = rest
        return causes, refused

    def _sufficient(self, causes: Sequence[Cause]) -> Cause | None:
        """Return the cause whose exchanges alone make the step right, if its call reads right values in that run."""
        for cause in causes:
            run = self._run_with([cause])
            if not self._wrong(run.recording) and not wrong_input(cause.culprit, ready_logs(self._known, run.calls)):
                cause.accounts = len(self._wrong(self.recordings["candidate"]))
                return cause
        return None

    def _without(
        self, dropped: Sequence[Cause], causes: list[Cause], right: ExchangedRun
    ) -> tuple[ExchangedRun, list[Cause]]:
        """Run the step without the exchanges of some causes. Returns the run, and the causes that are still needed.

        These are all `causes`, unless the step is right and the calls of the other causes read the same values as in
        the run `right`.
        """
        others = [each for each in causes if each not in dropped]
        run = self._run_with(others)
        is_same = not self._wrong(run.recording) and _read_by_leads(others, run) == _read_by_leads(others, right)
        return run, others if is_same else causes

    def _run_with(self, causes: Sequence[Cause]) -> ExchangedRun:
        """Run the candidate's step with the exchanges of some of the causes that were found."""
        swaps = [swap._replace(found="") for swap in _swaps(causes, "candidate")]  # what stands there follows
        return self._exchanged("candidate", swaps) if causes else self._first_run()

    def _reversed(self, causes: Sequence[Cause]) -> bool | None:
        """Whether the reference, with the candidate's values, computes the candidate's records.

        None if some of these values cannot be exchanged.
        """
        # The planned values of later causes come from runs with exchanges. The reference must get those
        # of the first run.
        swaps = [self._at_first(swap) for swap in _swaps(causes, "reference")]
        known = [swap for swap in swaps if swap is not None]
        run = self._exchanged("reference", known)
        if len(known) < len(swaps) or not all(made.done for made in run.made.values()):
            return None
        return self._digests(run.recording) == self._keys["candidate"]

    def _at_first(self, swap: Swap) -> Swap | None:
        """Return `swap`, an exchange in the reference, changed to insert the value of the candidate's first replay.

        No values were exchanged yet in that replay. Returns None if it has no such value.
        """
        calls, index = self.logs["candidate"][swap.value.rank], swap.value.call
        value = value_at(calls[index], swap.value) if index < len(calls) else None
        return None if value is None else swap._replace(found="", wanted=value)

    def _verification(
        self, causes: Sequence[Cause], run: ExchangedRun, reason: str, reverse: bool | None
    ) -> Verification:
        remaining, before = len(self._wrong(run.recording)), len(self._wrong(self.recordings["candidate"]))
        accounts = causes[0].accounts if causes else 0
        # A right step alone does not verify the cause: the exchanged values must also explain the whole difference.
        if not remaining and reverse is False:
            reason = "the reference with the candidate's value here does not give the candidate's step"
        elif not remaining and reverse is None and not reason:
            reason = "the reverse exchange could not be made"
        calls = causes[0].others if causes else []
        status = Verification.strongest(before, remaining, reverse)
        return Verification(
            status="in part" if reason and status == "verified" else status,
            tensors=len(self._keys["reference"]),
            differing=before,
            remaining=remaining,
            accounts=accounts,
            reverse=reverse,
            reason=reason or None,
            calls=calls[:MAX_CALLS_SHOWN],
            calls_left_out=max(0, len(calls) - MAX_CALLS_SHOWN),
            causes=[_other_cause(each) for each in causes[1:]],
            runs=self._runs,
        )

    def _exchanged(self, role: Role, swaps: Sequence[Swap]) -> ExchangedRun:
        """Run a system's step with values of the other system, and return the result."""
        other: Role = "reference" if role == "candidate" else "candidate"
        self._fetch(other, [swap.value for swap in swaps])
        self._runs += 1
        # Only a candidate's run is searched for further causes, so only its calls are logged.
        folder = self._replay(
            role, Replay(step=self.step, log=role == "candidate", exchanges=self._planned(other, swaps))
        )
        ranks = range(len(self._known))
        calls = [read_log(archive_of(folder, rank)) for rank in ranks]
        for rank in ranks:
            self.types |= read_types(archive_of(folder, rank))
        records = {key: row for rank in ranks for key, row in read_records(archive_of(folder, rank)).items()}
        made = {each.site: each for rank in ranks for each in read_exchanged(archive_of(folder, rank))}
        return ExchangedRun(calls, Recording(self.recordings[role].manifest, records), made)

    def _planned(self, other: Role, swaps: Sequence[Swap]) -> tuple[ValueExchange, ...]:
        places = self._values[other]
        return tuple(
            ValueExchange(
                site=swap.site,
                archives=places[swap.value][0],
                name=places[swap.value][1],
                wanted=swap.wanted,
                operator=swap.operator,
                found=swap.found,
                reads=swap.reads,
                in_place=swap.in_place,
            )
            for swap in swaps
        )

    def _fetch(self, role: Role, sites: Sequence[ValueSite]) -> None:
        """Get a system's values at some sites: from its first replay if it kept them, otherwise from a new replay."""
        known = self._values.setdefault(role, {})
        wanted = tuple(dict.fromkeys(site for site in sites if site not in known))
        if not wanted:
            return
        folder = archives_of(self.folder, role, self._number)
        if copy_spare_values(archives_of(self.folder, role), folder, [self._kept_as(role, site) for site in wanted]):
            self._number += 1
        else:
            is_alias = any(site.position < 0 for site in wanted)  # only a log shows which tensors are aliases
            folder = self._replay(role, Replay(step=self.step, values=wanted, log=is_alias))
        known |= {site: (folder.resolve(), name_of_value(number)) for number, site in enumerate(wanted)}

    def _kept_as(self, role: Role, site: ValueSite) -> ValueSite:
        """Return the first output on this rank that has the value at `site`; `site` itself if no output has it.

        For example, the input of an `mm` is kept as the output of the all-gather before it.
        """
        # The first replay keeps outputs only. Reversed, so that the first output with a value stays.
        calls = self.logs[role][site.rank]
        if site.rank not in (outputs := self._outputs.setdefault(role, {})):
            sites = ((value, (index, at)) for index, call in enumerate(calls) for at, value in enumerate(call.outputs))
            outputs[site.rank] = {value: ValueSite(site.rank, *where) for value, where in reversed([*sites])}
        return outputs[site.rank].get(value_at(calls[site.call], site) or "", site)

    def _replay(self, role: Role, replay: Replay) -> Path:
        number, self._number = self._number, self._number + 1
        folder = archives_of(self.folder, role, number)
        self.run_replay(role, number, folder, replay)
        return folder

    def _digests(self, recording: Recording) -> dict[Key, str]:
        by_rank = [recording.records_at(rank, self.step) for rank in range(len(self.logs["reference"]))]
        return {key: row.digest for rows in by_rank for key, row in rows.items()}

    def _wrong(self, recording: Recording) -> set[Key]:
        """Return the records of the step that differ from the reference's, missing and extra records included."""
        right, found = self._keys["reference"], self._digests(recording)
        return {key for key in right.keys() | found.keys() if right.get(key) != found.get(key)}

    def _pairs(self, recording: Recording) -> Differing:
        return differing_digests(self.recordings["reference"], recording, self.step)


def _read_by_leads(causes: Sequence[Cause], run: ExchangedRun) -> list[list[str]]:
    """Return the inputs of the calls at which the causes' own values are exchanged, without the exchanged inputs."""
    groups = [group for cause in causes for group in cause.groups if group.is_lead]
    sites = [swap.site for group in groups for swap in group.candidate]
    # Data may decide how many calls a run makes.
    calls = [(run.calls[site.rank], site.call) for site in sites]
    inputs = [made[index].inputs if index < len(made) else () for made, index in calls]
    return [
        [value for position, value in enumerate(found) if site._replace(position=position, is_input=True) not in sites]
        for site, found in zip(sites, inputs, strict=True)
    ]


def _read_by(culprit: Culprit, log: CandidateLog) -> set[str]:
    """Return the digests that a missing call and the missing calls before it read; empty for other calls."""
    pending, seen = [culprit.index] if culprit.candidate is None else [], set[int]()
    while pending:
        if (index := pending.pop()) not in seen and log.matching_here(index) is None:
            seen.add(index)
            pending += log.reference.producers(index)
    return {value for index in seen for value in log.reference.log[index].inputs}


def unrepeated(calls: Sequence[Call], again: Sequence[Call], exchanged: Collection[int]) -> int | None:
    """Return the index of the first call whose output differs between two runs of the candidate; None if none differs.

    The comparison ends at a differing call whose index is in `exchanged`, and at a differing collective. Views do not
    count.
    """
    # Calls after an exchanged value differ because of it, and a collective may receive such a value from another rank.
    # A view may show freed or uninitialized memory that no call reads.
    for index, (first, second) in enumerate(zip(calls, again, strict=False)):
        is_other = first.operator != second.operator or first.outputs != second.outputs
        if index in exchanged and (is_other or first.inputs != second.inputs):
            return None
        if is_other and not first.view and not _shows_unwritten_memory(first, second):
            return None if first.collective else index
    return None if len(calls) == len(again) else min(len(calls), len(again))


def _shows_unwritten_memory(first: Call, second: Call) -> bool:
    """Whether two runs of a call differ in an input that no call has written.

    For example, FSDP's `all_gather_copy_in` fills a part of a new buffer and returns the whole. Calls that compute with
    such memory differ, too, and are found by their own outputs.
    """
    triples = zip(first.inputs, second.inputs, first.producers, strict=False)
    return any(value != again and producer is None for value, again, producer in triples)


def describe_cause(culprit: Culprit) -> str:
    """Return a cause in one line: the call, its rank and its defect."""
    with_arguments = f", with {culprit.arguments}" if culprit.arguments else ""
    where = f" ({culprit.call.source})" if culprit.call.source else ""
    return f"{culprit.call} on rank {culprit.rank} {HOW[culprit.how]}{with_arguments}{where}"


def _other_cause(cause: Cause) -> OtherCause:
    culprit, place = cause.culprit, cause.culprit.call.place
    return OtherCause(
        call=describe_cause(culprit),
        accounts=cause.accounts,
        operator=culprit.call.operator,
        module=place.module,
        direction=place.direction,
        rank=culprit.rank,
    )


def _swaps(causes: Sequence[Cause], role: Role) -> list[Swap]:
    """Return the exchanges in a system for some causes, a single exchange per site.

    If several are planned for a site, an exchange of a blamed call takes precedence.
    """
    groups = sorted((group for cause in causes for group in cause.groups), key=lambda group: not group.is_lead)
    found: dict[ValueSite, Swap] = {}
    for group in groups:
        for swap in getattr(group, role):
            found.setdefault(swap.site, swap)
    return list(found.values())


def _where(made: Exchanged, run: ExchangedRun) -> str:
    rank, index, position, is_input = made.site
    calls = run.calls[rank]
    call = f"{calls[index]}" if index < len(calls) else f"call {index}"
    return f"{'input' if is_input else 'output'} {position} of {call} on rank {rank}"


def _joined(problems: Sequence[str]) -> str:
    return "; ".join(dict.fromkeys(problems))
