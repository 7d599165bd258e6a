"""Compares two environments. A call has moved if its results differ between them.

1. Record the program's distinct calls in the old environment, and replay them there. Calls that do not repeat their
   results are left out.
2. Replay the calls in the new environment, to find those that have moved. Run the program there, too.
3. If the program's records differ, run it in the new environment with the old results of the moved calls.
4. If a difference is left, look at the first call that differs. If its inputs are equal in both environments, it has
   moved, too: repeat step 3 with this call included.
5. For each moved call, probe in both environments how its kernel adds, and try settings that restore the old bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from bitproof.harness.powers.moved.environments import Environment
from bitproof.harness.powers.moved.move_causes import causes_of, smallest_shape
from bitproof.harness.powers.moved.program_runs import CaseOnRanks, ProgramRuns
from bitproof.harness.powers.moved.records import MOVED, MovedCertificate, MovedRow, Verdict, Verified

MOST_ROUNDS, MOST_ALONE = 8, 12
SWITCHES: tuple[Mapping[str, str], ...] = (
    {"OMP_NUM_THREADS": "1"},
    {"ATEN_CPU_CAPABILITY": "avx512"},
    {"ATEN_CPU_CAPABILITY": "avx2"},
    {"ONEDNN_MAX_CPU_ISA": "ALL"},
    {"ONEDNN_MAX_CPU_ISA": "AVX2"},
    {"ONEDNN_DEFAULT_FPMATH_MODE": "STRICT"},
)
"""Settings of the new environment that are tried, each alone."""


@dataclass(kw_only=True)
class TwoEnvironments:
    """Compares two environments. The archive of calls is in `folder`.

    - `budget`: most bytes of values to store.
    - `memory`: most bytes of memory that a replay may use.
    - `seconds`: time limit of each process.
    - `explains`: whether to look for causes.
    """

    old: Environment
    new: Environment
    folder: Path
    program: ProgramRuns | None = None
    budget: int
    memory: int
    seconds: float
    device: str = "cpu"
    explains: bool = True
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)

    def record(self) -> dict[str, Any]:
        """Record the program's calls in the old environment. Returns a dict of numbers:

        - "calls": distinct calls.
        - "drawn": calls with inputs above the budget. A replay uses random inputs for them.
        - "bytes": size of the stored values.
        """
        return self._program.ask(self.old, "record", self.folder, self.seconds, budget=self.budget)

    @property
    def _program(self) -> ProgramRuns:
        assert self.program is not None, "an archive alone is only replayed"
        return self.program

    def replay(self, *, control: bool) -> MovedCertificate:
        """Replay the archive's calls in the new environment, and return the certificate so far.

        The program does not run. If `control`, also replay the calls in the old environment. Calls whose results differ
        there count as nondeterministic, not as moved.
        """
        repeats = self._replay(self.old)["rows"] if control else {}
        found = self._replay(self.new, device=self.device)
        for key, row in found["rows"].items():
            # Without this, noise of the old environment would be taken for a move.
            if key in repeats and repeats[key]["state"] != "equal":
                row |= {"state": "nondeterministic", "detail": "it does not repeat in the old environment"}
        self.rows = found["rows"]
        recorded = found["recorded"]
        return MovedCertificate(
            program=recorded["program"],
            steps=recorded["steps"],
            old=recorded["environment"],
            new=found["environment"],
            variables=dict(self.new.variables),
            verified=Verified(),
            **self._counted(),
            uncollected=recorded["uncollected"],
        )

    def _replay(
        self, environment: Environment, only: Sequence[str] | None = None, device: str = "cpu"
    ) -> dict[str, Any]:
        threads, memory = environment.threads, self.memory
        asked = {"folder": str(self.folder), "threads": threads, "memory": memory, "only": only, "device": device}
        asked["package"] = environment.package
        return environment.ask("replay", asked, self.seconds)

    def verify(self) -> Verified:
        """Run the program in the new environment: first unchanged, then with the old results of the moved calls.

        Call `replay` before this method: it finds the moved calls, whose results changed.
        """
        # A program that finds a cache of its first run makes fewer calls, and would hide those that moved.
        (old,) = self._runs([[]], self.old)
        plain, again = self._runs([[], []])
        facts: dict[str, Any] = {"records": plain["records"], "first": plain["first"]}
        if not (old["equal"] and old["has_same_calls"]):
            reason = (
                "a second run in the old environment differs from the first: it reads a file of that, or has no seed"
            )
            return Verified(plain="NONDETERMINISTIC", remainder=reason, **facts)
        # Otherwise noise of the new environment would be taken for a move.
        if plain["digest"] != again["digest"]:
            return Verified(plain="NONDETERMINISTIC", **facts)
        if plain["equal"]:
            return Verified(plain="EQUAL", **facts)
        keys = [key for key, row in self.rows.items() if row["state"] == MOVED]
        inputs: list[str] = []
        best = plain
        for _ in range(MOST_ROUNDS):
            again_moved = best["moved_again"]
            if again_moved is not None:  # the first call that read the same and gave other bits
                # Named by its inputs, too: its key may be that of a call that was recorded with other values.
                inputs.append(again_moved["in"])
                if again_moved["key"] not in keys:
                    keys.append(again_moved["key"])
                    self._add_moved(again_moved["key"], again_moved["op"])
            # No call moved, so there are no old results to exchange.
            if not keys:
                break
            asked = {"keys": keys, "inputs": inputs, "budget": self.budget * 2}
            kept = self._program.ask(self.old, "results", self.folder, self.seconds, **asked)
            if not kept["repeats"]:
                return Verified(plain="NONDETERMINISTIC", remainder="the program differs from itself, old", **facts)
            (best,) = self._runs([keys])
            # No progress is possible: all is equal, or no call moved that read the same inputs, or its old results
            # were tried already.
            if best["equal"] or best["moved_again"] is None or best["moved_again"]["in"] in inputs:
                break
        if keys and best["equal"] and len(keys) > 1 and self.explains:
            without = keys[:MOST_ALONE]
            # All old results but those of one call: what then differs is that call's own effect.
            runs = self._runs([[each for each in keys if each != key] for key in without])
            for key, run in zip(without, runs, strict=True):
                self.rows[key]["alone"] = run["first"] or "no record changes"
        # With a single moved call, the plain run has already shown its effect.
        elif best["equal"] and len(keys) == 1:
            self.rows[keys[0]]["alone"] = facts["first"]
        verdict: Verdict = "not run" if best is plain else "EQUAL" if best["equal"] else "DIFFERENT"
        remainder = "" if best["equal"] else _remainder(best)
        return Verified(
            plain="DIFFERENT", with_exchange=verdict, exchanged=best["exchanged"], remainder=remainder, **facts
        )

    def _add_moved(self, key: str, operator: str) -> None:
        # The replay has not shown this: the results agreed on the recorded inputs, or the call was not recorded.
        row = self.rows.setdefault(key, {"op": operator, "dtypes": [], "shapes": [], "drawn": False, "state": "equal"})
        if row["state"] == "equal":
            detail = "equal on its recorded inputs, moved on others of the program"
            row |= {"state": MOVED, "detail": detail, "only_in_the_program": True}

    def _runs(self, sets: Sequence[Sequence[str]], environment: Environment | None = None) -> list[dict[str, Any]]:
        sets = [[*keys] for keys in sets]
        found = self._program.ask(environment or self.new, "exchange", self.folder, self.seconds, sets=sets)
        runs: list[dict[str, Any]] = found["runs"]
        return runs

    def explain(self) -> None:
        """Find for each moved call the smallest shape at which it moves, causes, and a setting that restores bits."""
        rows = self.rows.items()
        keys = [key for key, row in rows if row["state"] == MOVED and not row.get("only_in_the_program")]
        if not keys:
            return
        asked = {"folder": str(self.folder), "only": keys}
        old, new = (each.ask("probe", asked, self.seconds)["probes"] for each in (self.old, self.new))
        for key in keys:
            self.rows[key]["causes"] = causes_of(old[key], new[key])
            self.rows[key]["smallest"] = smallest_shape(old[key]["shapes"], new[key]["shapes"])
        # Each switch is tried on the calls that no earlier one brought back.
        left = list(keys)
        for switch in SWITCHES:
            # A switch that the new environment has already set changes nothing.
            if not left or switch.items() <= self.new.variables.items():
                continue
            tried = Environment(python=self.new.python, variables={**self.new.variables, **switch})
            rows = self._replay(tried, left)["rows"]
            for key in [key for key in left if rows[key]["state"] == "equal"]:
                self.rows[key]["switch"] = " ".join(f"{name}={value}" for name, value in switch.items())
                left.remove(key)

    def finished(self, certificate: MovedCertificate, verified: Verified) -> MovedCertificate:
        """Return `certificate` with the facts that were found since `replay` returned it:

        - the verdicts about the program (`verified`);
        - the calls, counted again, with their causes;
        - for a case, the system and its recordings.
        """
        facts: dict[str, Any] = {"verified": verified, **self._counted()}
        if isinstance(self.program, CaseOnRanks):
            facts |= {"system": self.program.system, "recordings": self.program.identities}
        # Counts again, since `verify` may have added moved calls.
        return MovedCertificate(**{**vars(certificate), **facts})

    def _counted(self) -> dict[str, Any]:
        rows = [self._row(row) for row in self.rows.values() if row["state"] != "equal"]
        operators = len({row["op"] for row in self.rows.values()})
        return {"calls": len(self.rows), "operators": operators, "equal": len(self.rows) - len(rows), "rows": rows}

    def _row(self, row: Mapping[str, Any]) -> MovedRow:
        # `first` is converted: JSON has lists where the row has tuples.
        names = {each.name for each in fields(MovedRow)} & row.keys() - {"first"}
        first = [(at, old, new) for at, old, new in row.get("first", ())]
        return MovedRow(operator=row["op"], is_drawn=row["drawn"], first=first, **{name: row[name] for name in names})


def _remainder(run: Mapping[str, Any]) -> str:
    if (again := run["moved_again"]) is not None:
        return f"call {again['call']}, {again['op']}, moves on values of the program; its old results were not kept"
    if (other := run["other"]) is not None:
        was = f", was {other['was']}" if other["was"] else ""
        return f"not from an operator: call {other['call']} reads other values or arguments: {other['now']}{was}"
    return "not from an operator that was replayed: every call agrees, and records do not"
