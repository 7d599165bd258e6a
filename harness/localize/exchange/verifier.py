"""Verify a cause by exchange: run the step again with the other system's value where the blamed call is wrong.

Example: `mul` scales by 0.25, and by 0.125 in the reference. With the reference's output of `mul`, all 44 tensors of
the step are equal. With the candidate's, the reference computes the candidate's 44 tensors. So the cause is verified.

1. The candidate's step runs again, and the reference's value replaces the output of the blamed call. If all records
   then equal the reference's, nothing else is wrong.
2. Otherwise the next call to blame is searched in the log of that run, and exchanged as well. It belongs to the same
   cause, such as a backward call, or is another cause. At most `MAX_ROUNDS` runs.
3. If there are several causes, the step runs without each of them. A cause that is not needed is dropped. If one of
   them made no tensor equal, the step also runs with each cause alone, since one may suffice.
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
from bitproof.harness.localize.exchange.wrong_arguments import (
    Wrong,
    WrongArguments,
    family_of,
    is_of_family,
    of_setting,
)
from bitproof.harness.localize.logs.calls import CLIPPING, READS_OUT, Call, producer_of, returns_only_inputs
from bitproof.harness.localize.logs.candidate_log import CandidateLog
from bitproof.harness.localize.logs.joined_logs import JoinedLogs
from bitproof.harness.localize.logs.packing import GATHERS, PACKING, keeps_order, name_of
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

_OTHER_CALLS = "adds", "lacks", "reads"
"""Defects of a forward call that change the backward calls which autograd derives from it."""

_FIRST_NUMBER = 20
"""The number of the first of these replays; other replays of a search have smaller numbers."""

Differing = Mapping[int, Sequence[tuple[str, str]]]


@dataclass
class Cause:
    """A cause: the first wrong call, its wrong arguments, and the exchanges for all calls with this defect.

    `accounts` is the number of tensors that become equal by these exchanges, and `ways` is how the call misreads its
    inputs (`ways_of`).
    """

    culprit: Culprit
    wrong: Wrong
    ways: Collection[str] = ()
    groups: list[WrongCall] = field(default_factory=list)
    accounts: int = 0

    def has(self, culprit: Culprit, wrong: Wrong, reads: Collection[str] = (), ways: Collection[str] = ()) -> bool:
        """Whether `culprit`, a wrong call that was found later, belongs to this cause: it has the same defect.

        Example: a wrong forward call of a module, and its backward call. `reads` has digests that `culprit` reads in
        addition to its inputs, and `ways` is how it misreads these.
        """
        if not set(ways).isdisjoint(self.ways):
            return True
        # The order matters: a wrong setting or a backward call of the same module is decisive, before operators and
        # lines are compared.
        if settings := of_setting(wrong):
            return bool(settings & of_setting(self.wrong))
        mine, other = self.culprit.call, culprit.call
        is_there = (mine.place.module, mine.micro_batch) == (other.place.module, other.micro_batch)
        directions = mine.place.direction, other.place.direction
        if is_there and directions == ("forward", "backward") and culprit.how in _OTHER_CALLS:
            return self.culprit.how in _OTHER_CALLS or self._is_argument_of(other, culprit.how)
        # One call of `clip_grad_norm_` makes several operator calls.
        if mine.part == other.part == CLIPPING and mine.source is not None and mine.source == other.source:
            return True
        if self._takes_place_of(culprit, {*culprit.call.inputs, *reads}):
            return True
        if wrong and wrong == self.wrong and is_of_family(mine, other, wrong):
            return True
        if family_of(mine.operator) != family_of(other.operator):
            return False
        # The calls of an update have no module, so only their lines distinguish clipping from scaling.
        if "update" in directions and None not in (mine.source, other.source):
            return mine.source == other.source
        is_one_line = mine.source is not None and (mine.source, mine.operator) == (other.source, other.operator)
        return is_there or is_one_line

    def _takes_place_of(self, culprit: Culprit, reads: Collection[str]) -> bool:
        """Whether this cause and `culprit` are a superfluous and a missing call ("adds" and "lacks") that share an
        input.

        For example, the reference reduces a gradient. The candidate first adds another gradient to it, and reduces the
        sum.
        """
        direction = culprit.call.place.direction
        if {self.culprit.how, culprit.how} != {"adds", "lacks"} or self.culprit.call.place.direction != direction:
            return False
        calls = [self.culprit.call, *(group.call for group in self.groups if group.rank == culprit.rank)]
        return any(not set(call.inputs).isdisjoint(reads) for call in calls)

    def _is_argument_of(self, call: Call, how: str) -> bool:
        """Whether only one system makes `call` because of this cause's wrong argument.

        A call that only the candidate makes ("adds") then has the wrong argument, and a call that only the reference
        makes ("lacks") has the right one. For example, the backward of `add` with `alpha=0.99` makes a `mul` by 0.99;
        with `alpha=1` it makes none.
        """
        # A pair has the candidate's value at 0, and the reference's at 1.
        values = {pair[how == "lacks"] for pair in self.wrong}
        return any(value in values for _, value in call.scalars)

    @property
    def others(self) -> list[str]:
        """Return a text for each other call of the cause, with its ranks: `mul of layers.0 (backward) on ranks 0,
        1`.
        """
        ranks: dict[str, set[int]] = {}
        for group in self.groups:
            ranks.setdefault(str(group.call), set()).add(group.rank)
        ranks.pop(str(self.culprit.call), None)
        return [
            f"{call} on rank{'s' if len(on) > 1 else ''} {', '.join(map(str, sorted(on)))}"
            for call, on in ranks.items()
        ]


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
                pending += [each for each in _extra_before(current, logs) if each not in passed]
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
        return [] if rank is None else culprits_in(logs, pairs, (rank, pairs[rank][0]))[:MAX_CULPRITS]

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


def wrong_input(culprit: Culprit, logs: Sequence[CandidateLog]) -> str:
    """Return the reason why the blamed call cannot be the cause; "" if there is no such reason.

    The reasons are:
    - The call reads a wrong value, so an earlier call is wrong.
    - Only the reference makes the call, and it reads a value that the candidate does not have.
    - Only the candidate makes the call, but its output is a value that the reference also has, and that a reader needs.
    - The call's output is in another tensor's place, but it reads what only the candidate joins in a bucket, which may
      have exchanged the values.
    """
    log = logs[culprit.rank]
    if culprit.candidate is None:
        call = log.reference.log[culprit.index]
        is_there = culprit.how != "lacks" or _has_inputs(log, culprit.index)
        return "" if is_there else f"the candidate does not have what {call} reads"
    mine = log.log[culprit.candidate]
    if text := _wrong_number(culprit, log):
        return text
    # A view in place of another takes another part of the same tensor, which may be right elsewhere.
    takes_another_part = mine.view and culprit.instead_of is not None
    is_right = log.makes_right_values(culprit.candidate) and not _is_wrong_for_readers(log, culprit.candidate)
    if culprit.how == "adds" and not takes_another_part and is_right:
        return f"what {mine} gives is right: the reference has it, too"
    theirs = log.reference.log[culprit.reference].inputs if culprit.reference is not None else ()
    if mine.collective and (text := _wrong_peer(culprit, logs)):
        return text
    # A cause must read right values only. An input that the matching call has as well, or that is from before the step,
    # is not due to an earlier call.
    for position, (value, producer) in enumerate(
        zip(mine.inputs, log.input_producers(culprit.candidate), strict=False)
    ):
        is_as_due = theirs[position : position + 1] == (value,) and culprit.how != "misplaces"
        if producer is None or is_as_due:
            continue
        maker = producer_of(log.log, log.input_producers, culprit.candidate, position)
        if maker is None or (log.log[maker].view and not log.producers(maker)):
            continue  # it was there before the step
        if culprit.how == "misplaces" and _is_of_a_bucket(log, maker):
            return f"it reads what {log.log[maker]} gives, which the reference does not compute"
        if culprit.how == "reads":  # a view of the whole computes nothing, so what it is a view of counts
            while keeps_order(log.log[producer]) and (behind := log.input_producers(producer)[0]) is not None:
                producer, value = behind, log.log[producer].inputs[0]
        own = log.read_behind(producer) if culprit.how == "reads" else set()
        if own and log.reference.values.issuperset(own):
            continue  # the value of an extra call that computes it of right values: this call should read another one
        if value not in log.reference.values and not (
            culprit.how == "adds" and _only_moves(logs, culprit.rank, producer)
        ):
            return f"it reads what {log.log[producer]} gives, which the reference does not have"
        if log.matching_call(producer) is not None and not log.is_as_matched(producer, value):
            return f"it reads what {log.log[producer]} gives, which differs from what its matching call gives"
    return ""


def _extra_before(culprit: Culprit, logs: Sequence[CandidateLog]) -> list[Culprit]:
    """Return the extra calls whose outputs an extra call reads: one of them may be wrong first.

    For example, only the candidate transposes a value, and then copies it.
    """
    log = logs[culprit.rank]
    makers = log.producers(culprit.candidate) if culprit.how == "adds" and culprit.candidate is not None else ()
    extra = [index for index in dict.fromkeys(makers) if log.matching_call(index) is None and log.differs(index)]
    return [replace(culprit, call=log.log[index], candidate=index, instead_of="", chain=()) for index in extra]


def _is_of_a_bucket(log: CandidateLog, index: int) -> bool:
    """Whether a call returns what calls that only the candidate makes have joined: they may have exchanged values."""
    pending, seen = [index], set[int]()
    while pending:
        if (current := pending.pop()) not in seen and log.matching_call(current) is None:
            if name_of(log.log[current]) in PACKING and not log.log[current].view:
                return True
            seen.add(current)
            pending += log.producers(current)
    return False


def _is_wrong_for_readers(log: CandidateLog, index: int) -> bool:
    """Whether all readers of a call with a match need another value in place of each output of it that they read.

    For example, a reduction needs the value before an extra cast to bfloat16, which the reference also makes elsewhere.
    False without such readers, and for a call that only copies or joins: its reader reads the wrong tensor.
    """
    if returns_only_inputs(log.log[index]) or name_of(log.log[index]) in PACKING:
        return False
    outputs, due = set(log.log[index].outputs), list[tuple[str, str]]()
    for reader, position in log.readers(index):
        other = log.matching_call(reader)
        wanted = log.reference.log[other].inputs if other is not None else ()
        if len(wanted) == len(log.log[reader].inputs):
            due.append((log.log[reader].inputs[position], wanted[position]))
    return bool(due) and all(found in outputs and found != wanted for found, wanted in due)


def _only_moves(logs: Sequence[CandidateLog], rank: int, index: int) -> bool:
    """Whether a call that only the candidate makes just selects, copies or gathers right values, such as an element of
    a tensor. `index` is the call's in the log of `rank`.

    If so, its output is right. False if the candidate lacks a selection that the reference makes: the call may be a
    wrong version of that selection.
    """
    log, call = logs[rank], logs[rank].log[index]
    if log.matching_call(index) is not None:
        return False
    if name_of(call) in GATHERS:
        joined = JoinedLogs([each.log for each in logs])
        return all(_reads_moved(logs, *site) for site in joined.together((rank, index)))
    moves = call.view or log.packs(index) or name_of(call) == "copy_"
    return (
        moves
        and not _may_replace_part(log, {value for value, _ in _moved(log, index)})
        and _reads_moved(logs, rank, index)
    )


def _moved(log: CandidateLog, index: int) -> list[tuple[str, int | None]]:
    """Return the inputs that a call may return, each with its producer: all but what `copy_` overwrites."""
    sides = [*zip(log.log[index].inputs, log.input_producers(index), strict=False)]
    return sides[1:] if name_of(log.log[index]) == "copy_" else sides


def _reads_moved(logs: Sequence[CandidateLog], rank: int, index: int) -> bool:
    """Whether a call reads right values only, or what calls return that just move such values."""
    log = logs[rank]
    return all(
        value in log.reference.values or (by is not None and _only_moves(logs, rank, by))
        for value, by in _moved(log, index)
    )


def _may_replace_part(log: CandidateLog, values: set[str]) -> bool:
    """Whether the reference takes a part of these values with a call that the candidate does not make."""
    return any(
        call.view and not values.isdisjoint(call.inputs) and log.matching_here(index) is None
        for index, call in enumerate(log.reference.log)
    )


def _has_inputs(log: CandidateLog, index: int) -> bool:
    """Whether the candidate has all inputs of a call of the reference.

    Also true if missing calls compute an input from values that the candidate has.
    """
    for value, producer in zip(log.reference.log[index].inputs, log.reference.input_producers(index), strict=False):
        if value in log.values or producer is None:
            continue
        if log.matching_here(producer) is not None or not _has_inputs(log, producer):
            return False
    return True


def _wrong_peer(culprit: Culprit, logs: Sequence[CandidateLog]) -> str:
    """Return the reason why a collective is not to blame: another rank passes a wrong value to it.

    Returns "" if no other rank does.
    """
    assert culprit.candidate is not None
    joined = JoinedLogs([log.log for log in logs])
    for rank, index in joined.together((culprit.rank, culprit.candidate)):
        other = logs[rank].matching_call(index)
        if rank != culprit.rank and other is not None:
            given, due = logs[rank].log[index], logs[rank].reference.log[other]
            # On a rank on which the call is blamed as well, other right inputs are the defect itself.
            is_blamed = rank in culprit.ranks and logs[rank].reads_right_values(index)
            if given.inputs != due.inputs and not is_blamed:
                return f"it brings what {given} on rank {rank} gives to it, and its matching call gives another value"
    return ""


def _wrong_number(culprit: Culprit, log: CandidateLog) -> str:
    """Return the reason why a call is not to blame: its number argument was read out of a tensor that is already wrong.

    `item()` reads such numbers. Returns "" if there is no such argument, as for a number from the program's own code.
    """
    if culprit.candidate is None or culprit.reference is None:
        return ""
    known = dict(log.reference.log[culprit.reference].scalars)
    numbers = {f"number {value}" for name, value in log.log[culprit.candidate].scalars if known.get(name) != value}
    for index, call in enumerate(log.log[: culprit.candidate] if numbers else ()):
        # Dynamo makes a tensor of a number in the code, which no call computes, and reads it out.
        is_computed = call.operator == READS_OUT and any(
            producer is not None for producer in log.input_producers(index)
        )
        if is_computed and numbers.intersection(call.outputs) - log.reference.values:
            return f"it is given a number that {call} reads out of a tensor, and that the reference does not have"
    return ""


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
