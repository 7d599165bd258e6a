"""A case: everything that can change a bit of a run, as a single frozen value.

It has two systems, the model, the layout of ranks, and the expected verdict. Every recording's manifest contains its
case.
"""

from __future__ import annotations

import dataclasses
import math
import re
import shlex
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from bitproof.harness.case.autoplace import Autoplace
from bitproof.harness.case.bounds import (
    LONGEST_NAME,
    MOST_STEPS_OF_RANKS,
    SEED,
    STEPS,
)
from bitproof.harness.case.case_parts import AdamW, Batch, Chunking, Memory, Model, Parallelism, Precision
from bitproof.harness.case.observed import check_observed
from bitproof.harness.case.schedule import Schedule, check_schedule
from bitproof.harness.case.stage_map import StageMap
from bitproof.harness.case.traced import COMPILED, Pipeline, check_traced
from bitproof.harness.errors import CaseError
from bitproof.harness.validate import STRICT, read

Kind = Literal["loss", "grad", "param", "buffer", "optimizer", "grad_norm", "activation", "rng"]
KINDS: tuple[Kind, ...] = typing.get_args(Kind)
USUAL_KINDS = KINDS[:5]
"""The kinds that every case may have. Others are recorded if a case requests them; `rng`, if a step draws numbers."""


ExpectedVerdict = Literal["EQUAL", "DIFFERENT", "CLOSE"]


@dataclass(frozen=True, kw_only=True)
class Case:
    """Two systems to compare on one model, and the expected verdict.

    Fields for the verdict:

    - `close_within`, for CLOSE: the largest relative error |r - c| / |r| (Euclidean norms over one tensor) that a
      recorded floating-point tensor may have. Tensors of other dtypes must agree in bits.
    - `differs`, for DIFFERENT: the kinds of records that differ at the first differing step. Exactly these kinds must
      differ, on any rank.
    - `differs_within`: the largest relative error of any tensor of the first differing step. None: there is no limit.

    Fields for records:

    - `grad_norm`: the norm of all gradients, over all ranks, is recorded at every step.
    - `observe`: patterns over module names. The outputs of these modules, and their gradients, are recorded at every
      step, as kind `activation`.

    Fields for the run:

    - `autoplace`: a solver chooses the placements of parameters, and both systems use them.
    - `options`: values for the user's factories, which read them as `case.options`.
    - `preload`: modules that take long to import. They are imported once, by the process from which all ranks are
      forked.
    - `reference_parallelism`: the layout of the reference; `parallelism` is then that of the candidate. Whole tensors
      are compared (`harness.compare.part_layouts`). With CLOSE and no limit, the limit is measured by running the
      reference with its sums in other orders.
    - `resume_at`: after this many steps the candidate saves a checkpoint, is killed, and continues in new processes.
    - `resumes_reference`: the reference runs the steps before `resume_at` on its own ranks, and saves. The candidate
      loads this checkpoint into its own layout.
    - `schedule`: a step has micro-batches, which pass through the stages of a pipeline if `parallelism.pp` is above 1.
    - `requires`: a device or package. A machine without it runs the case only if the case is selected by name.
    """

    __pydantic_config__ = STRICT

    name: str
    family: str
    reference: str = "eager_chunked"
    candidate: str = "graph"
    chunking: Chunking | None = None
    expected: ExpectedVerdict = "EQUAL"
    differs: tuple[Kind, ...] = ()
    close_within: float | None = None
    differs_within: float | None = None
    requires: Literal["cuda", "scipy"] | None = None
    grad_norm: bool = False
    observe: tuple[str, ...] = ()
    autoplace: Autoplace | None = None
    preload: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict, hash=False)  # a dict has no hash
    steps: int = 20
    seed: int = 0
    model: Model = field(default_factory=Model)
    parallelism: Parallelism = field(default_factory=Parallelism)
    reference_parallelism: Parallelism | None = None
    resume_at: int | None = None
    resumes_reference: bool = False
    batch: Batch = field(default_factory=Batch)
    schedule: Schedule | None = None
    precision: Precision = field(default_factory=Precision)
    memory: Memory = field(default_factory=Memory)
    pipeline: Pipeline = field(default_factory=Pipeline)
    optimizer: AdamW = field(default_factory=AdamW)

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z][a-z0-9_]*", self.name) or len(self.name) > LONGEST_NAME:
            raise CaseError(
                "a case name serves as a folder name and in -k expressions",
                expected="at most 100 lower-case letters, digits and _, starting with a letter",
                found=repr(self.name),
            )
        STEPS.check("steps", self.steps)
        SEED.check("seed", self.seed)
        if wrong := [name for name in self.preload if not all(part.isidentifier() for part in name.split("."))]:
            raise CaseError(
                f"case {self.name} preloads what is no module", expected="names as in `import`", found=repr(wrong[0])
            )
        if self.steps * self.parallelism.world_size > MOST_STEPS_OF_RANKS:
            raise CaseError(
                f"case {self.name} takes more steps on more ranks than can be recorded",
                expected=f"steps times parallelism.world_size at most {MOST_STEPS_OF_RANKS:,}",
                found=f"steps={self.steps:,}, parallelism.world_size={self.parallelism.world_size:,}",
            )
        if self.expected not in typing.get_args(ExpectedVerdict):
            raise CaseError(
                f"case {self.name} expects an unknown verdict",
                expected=" or ".join(typing.get_args(ExpectedVerdict)),
                found=repr(self.expected),
            )
        if (self.expected == "DIFFERENT") != bool(self.differs):
            raise CaseError(
                f"case {self.name} must list the kinds that differ exactly when it expects DIFFERENT",
                expected="expected='DIFFERENT' with differs=(...), or expected='EQUAL' with differs=()",
                found=f"expected={self.expected!r}, differs={self.differs!r}",
            )
        if unknown := set(self.differs) - set(KINDS):
            raise CaseError(
                f"case {self.name} lists unknown kinds", expected=", ".join(KINDS), found=", ".join(sorted(unknown))
            )
        self._check_bounds()
        # Built-in systems have no `save` and `load`.
        are_both_yours = is_factory(self.reference) and is_factory(self.candidate)
        if self.resume_at is not None and not (are_both_yours and 0 < self.resume_at < self.steps):
            raise CaseError(
                f"case {self.name} has its candidate end and go on where it cannot",
                expected=f"two systems of yours, and resume_at from 1 to steps - 1, that is {self.steps - 1}",
                found=f"resume_at={self.resume_at}, systems {self.reference} and {self.candidate}",
            )
        if self.resumes_reference and (self.resume_at is None or self.bound is not None):
            raise CaseError(
                f"case {self.name} loads what the reference saved where it cannot",
                expected="resume_at, and no bound of the case's own",
                found=f"resume_at={self.resume_at}, bound {self.bound}",
            )
        if "eager_chunked" in (self.reference, self.candidate) and self.chunking is None:
            raise CaseError(
                f"case {self.name} runs eager_chunked but does not say how to chunk",
                expected="chunking=Chunking(dim=..., modules=...)",
                found="chunking=None",
            )
        self._check_chunks()
        self._check_loss_pieces()
        self._check_sequence()
        check_traced(self)
        check_observed(self)
        check_schedule(self)

    @property
    def bound(self) -> float | None:
        """The largest relative error that the case allows; None if it states no limit."""
        # At most one of them is set, since they belong to different verdicts.
        return self.close_within or self.differs_within

    @property
    def micro_batches(self) -> int:
        """The number of parts into which a step divides a rank's rows."""
        return self.schedule.micro_batches if self.schedule else 1

    @property
    def stages(self) -> int:
        """The number of stages into which the model's layers are cut."""
        return self.stage_map.num_stages

    @property
    def stage_map(self) -> StageMap:
        """The pipeline ranks of all stages. A rank of the case is in the stages of its pipeline coordinate."""
        return self.schedule.stage_map(self.parallelism.pp) if self.schedule else StageMap(self.parallelism.pp)

    @property
    def gradient_seed(self) -> float:
        """The gradient that backward starts from: the weight of a micro-batch's mean loss on a rank."""
        return 1 / (self.parallelism.data_ranks * self.micro_batches)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of a micro-batch's token ids: (sequences, seq_len), or (tokens,) with `model.folded`."""
        rows, seq_len = self.batch.sequences // self.micro_batches, self.batch.seq_len
        return (rows * seq_len,) if self.model.folded else (rows, seq_len)

    @property
    def chunk_dim(self) -> int:
        """The dim along which activations are cut into chunks: 0 for batch, 1 for seq; always 0 with `model.folded`."""
        assert self.chunking is not None
        return 0 if self.chunking.dim == "batch" or self.model.folded else 1

    def of(self, role: str) -> Case:
        """Return the case with the parallelism of the system in this role; the reference may have a parallelism of its
        own.
        """
        if role != "reference" or self.reference_parallelism is None:
            return self
        return dataclasses.replace(self, parallelism=self.reference_parallelism)

    @property
    def first_step(self) -> int:
        """The first step whose records are compared.

        It is 0, or `resume_at` if the candidate continues from a checkpoint of the reference on another number of
        ranks: only the reference runs the earlier steps.
        """
        has_as_many = self.of("reference").parallelism.world_size == self.parallelism.world_size
        return 0 if has_as_many or not self.resumes_reference else self.resume_at or 0

    @property
    def compared_steps(self) -> range:
        """The steps whose records are compared."""
        return range(self.first_step, self.steps)

    @property
    def most_ranks(self) -> int:
        """The number of ranks of the reference or of the candidate, whichever has more."""
        return max(self.parallelism.world_size, self.of("reference").parallelism.world_size)

    def _check_bounds(self) -> None:
        close, apart = self.close_within, self.differs_within
        # Between two layouts the limit may be left out: then it is measured.
        is_derived = self.expected == "CLOSE" and self.reference_parallelism is not None and close is None
        # 1 stands for a missing `close_within`, so that only its presence counts.
        is_stated = (self.expected == "CLOSE") == (close is not None) and 0 < (1 if close is None else close) < math.inf
        if not (is_stated or is_derived):
            raise CaseError(
                f"case {self.name} must state how close is close exactly when it expects CLOSE",
                expected="expected='CLOSE' with a finite close_within > 0, or another verdict with close_within=None",
                found=f"expected={self.expected!r}, close_within={close!r}",
            )
        if apart is not None and (self.expected != "DIFFERENT" or not 0 < apart < math.inf):
            raise CaseError(
                f"case {self.name} may state how far its systems differ only when it expects DIFFERENT",
                expected="expected='DIFFERENT' with a finite differs_within > 0, or differs_within=None",
                found=f"expected={self.expected!r}, differs_within={apart!r}",
            )

    def _check_chunks(self) -> None:
        if self.chunking is None:
            return
        field_name = "sequences" if self.chunking.dim == "batch" else "seq_len"
        extent = getattr(self.batch, field_name)
        # A folded model has no sequence dim, so its halves are counted in tokens.
        if self.model.folded:
            self._check_folded_chunks()
        elif extent % 2:
            raise CaseError(
                f"case {self.name} cannot be split in two along {self.chunking.dim}",
                expected=f"an even batch.{field_name}",
                found=f"batch.{field_name}={extent}",
                fix=f"choose {extent + 1}",
            )

    def _check_loss_pieces(self) -> None:
        tokens, pieces = math.prod(self.input_shape), self.model.loss_pieces
        if tokens % pieces:
            raise CaseError(
                f"case {self.name} cannot take its loss in pieces of equal size",
                expected=f"a multiple of model.loss_pieces={pieces} as the number of tokens"
                + (" in a micro-batch" if self.schedule else ""),
                found=f"{tokens} tokens",
                fix="choose a number of pieces that divides them",
            )

    def _check_folded_chunks(self) -> None:
        assert self.chunking is not None
        sequences, seq_len, (tokens,) = self.batch.sequences, self.batch.seq_len, self.input_shape
        # Along batch, each half must have whole sequences; along seq, each half needs equally many tokens.
        if self.chunking.dim == "batch" and sequences % 2:
            raise CaseError(
                f"case {self.name} cannot be split in two between its sequences",
                expected=f"an even batch.sequences, so that chunk 1 begins with a sequence of {seq_len} tokens",
                found=f"batch.sequences={sequences}: chunk 1 would begin inside a sequence, and inside a document",
                fix=f"choose {sequences + 1}, or dim='seq' for modules that treat each token alone",
            )
        if self.chunking.dim == "seq" and tokens % 2:
            raise CaseError(
                f"case {self.name} cannot be split in two along its tokens",
                expected="an even number of tokens" + (" in a micro-batch" if self.schedule else ""),
                found=f"{tokens}: batch.sequences={sequences}, batch.seq_len={seq_len}",
                fix="choose an even number of sequences, or of tokens in a sequence",
            )

    def _check_sequence(self) -> None:
        parallelism = self.parallelism
        if parallelism.sequence and self.model.folded:
            raise CaseError(
                f"case {self.name} divides a sequence dim over ranks that its folded model does not have",
                expected="model.folded=False with parallelism.sequence=True",
                found="model.folded=True",
                fix="leave one of them out",
            )
        # A plan may keep layers whole, and these cannot divide the sequence.
        if parallelism.sequence and (self.batch.seq_len % parallelism.tp or self.autoplace is not None):
            raise CaseError(
                f"case {self.name} cannot divide its sequence over the ranks of a tensor group",
                expected=f"batch.seq_len a multiple of tp={parallelism.tp}, and no autoplace, with "
                "parallelism.sequence=True",
                found=f"batch.seq_len={self.batch.seq_len}, autoplace={self.autoplace}",
            )

    def to_dict(self) -> dict[str, Any]:
        """Return the case as plain JSON values, for a manifest or another process."""
        return dataclasses.asdict(self)

    @property
    def is_foreign(self) -> bool:
        """Whether both systems are a user's trainers, which may ignore fields of the case such as its model."""
        return are_foreign(self.reference, self.candidate)

    def stated(self) -> dict[str, Any]:
        """Return the case as plain JSON values. If both systems are a user's trainers, fields with default values are
        left out.

        `from_dict` makes the same case from the result.
        """
        # A user's systems may ignore fields of the case, so defaults might be untrue for them.
        values = self.to_dict()
        if not self.is_foreign:
            return values
        # A case with the defaults of all fields. The default reference would need `chunking`, so it gets this
        # reference.
        plain = Case(name=self.name, family=self.family, reference=self.reference).to_dict()
        kept = {name: value for name, value in values.items() if name not in plain or name in _ALWAYS_STATED}
        for name in plain.keys() - _ALWAYS_STATED:
            if isinstance(value := values[name], dict) and isinstance(default := plain[name], dict):
                # The number of ranks is stated even if it is the default: it holds for every system.
                changed = {
                    part: each for part, each in value.items() if each != default.get(part) or part == "world_size"
                }
                kept |= {name: changed} if changed else {}
            elif value != plain[name]:
                kept[name] = value
        # In the order of the fields, in which `kept` was not filled.
        return {name: kept[name] for name in values if name in kept}

    @staticmethod
    def from_dict(values: dict[str, Any]) -> Case:
        """Make a case from the values of `to_dict`. Raises CaseError for unknown fields and values of wrong types."""
        return read(Case, values, "case", CaseError)


_ALWAYS_STATED = {"name", "family", "reference", "candidate", "expected", "differs", "steps", "seed"}
"""Fields that hold for every case, whatever its systems do: its name, how it is run and judged."""


def file_of(source: str) -> Path | None:
    """Return the path of the file that `source` names, such as train.py; None if `source` is a module."""
    return Path(source) if source.endswith(".py") or "/" in source else None


class Script(NamedTuple):
    """A training script as a system: its file, its arguments, and the file's git revision ("" for the working tree).

    Its text form, a command line, is the system's name: `train.py --lr 3e-4`, or `git:4f2a91c:train.py --lr 3e-4`.
    """

    file: str
    args: tuple[str, ...] = ()
    revision: str = ""

    def __str__(self) -> str:
        return shlex.join([f"git:{self.revision}:{self.file}" if self.revision else self.file, *self.args])


def script_of(system: str) -> Script | None:
    """Return the script that a system's name describes; None if the system is no script, such as `train.py:make`."""
    try:
        # shlex raises ValueError for an unclosed quote: a script's name has none.
        first, *args = shlex.split(system)
    except ValueError:
        return None
    prefix, _, rest = first.partition(":")
    revision, _, file = rest.partition(":") if prefix == "git" else ("", "", first)
    # `train.py:make` is a factory, and `git:train.py` has no revision.
    if not file.endswith(".py") or (":" in file and not revision) or (prefix == "git" and not revision):
        return None
    return Script(file, tuple(args), revision)


def is_factory(system: str) -> bool:
    """Whether a system's name describes a user's factory: `FILE.py:NAME` or `MODULE:NAME`."""
    return ":" in system and script_of(system) is None


def are_foreign(reference: object, candidate: object) -> bool:
    """Whether both systems are a user's trainers (factories or scripts).

    The system `compiled` runs the reference under torch.compile, so it counts as a user's trainer if the reference is
    one.
    """
    names = [
        each
        for each in (reference, candidate)
        if isinstance(each, str) and (is_factory(each) or script_of(each) is not None)
    ]
    # `compiled` is no user's system itself, so it is missing in `names`.
    return len(names) == 2 or (names == [reference] and candidate == COMPILED)
