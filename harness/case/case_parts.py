"""Define the parts of a case: model, chunks, ranks, batch, precision, memory and optimizer."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from bitproof.harness.case.bounds import (
    BETA,
    BLOCKS_AHEAD,
    CAPACITY,
    GIB,
    LOSS_PIECES,
    RANKS,
    RATE,
    SEQUENCES,
    SIZES,
    TOKENS,
)
from bitproof.harness.case.patterns import check_patterns, root_of
from bitproof.harness.errors import CaseError
from bitproof.harness.validate import STRICT

# 8 elements of bfloat16 take 16 bytes; the rows of grouped matrix products must be multiples of that.
DIM_MULTIPLE = 8

_SAVED = re.compile(r"[A-Za-z_]\w*(/[1-9]\d{0,3})?", re.ASCII)
"""An operator's name in `Memory.save`, and which calls are saved: mm/2 for every second."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model, its size, and its attention.

    - `flavor`: the name of a predefined set of sizes for this family of models. Each size below replaces the flavor's
      size, unless it is None.
    - `attention`: "flex" is FlexAttention with a mask that separates documents.
    - `dim`: the model dim. Hidden dims scale with it.
    - `heads`: the number of heads. The number of key/value heads scales with it.
    - `dense_layers`: how many layers at the start have no experts. By default as in the flavor, but at most `layers`.
    - `capacity`: limits the rows that an expert receives from a rank in a call, so that no tensor's size depends on
      data. The limit is `capacity` times an even share of the rank's rows, rounded up. Rows above the limit are
      dropped. For example, 8 rows for 4 experts are an even share of 2; with capacity 1.5 an expert receives at most 3.
    - `folded`: activations have the shape (tokens, dim) instead of (sequences, seq_len, dim). For example, 4 sequences
      of 32 tokens are 128 tokens. Positions begin at 0 in each document and in each sequence. Needs attention "flex".
    - `loss_pieces`: the number of equal pieces into which tokens are divided at the loss. Projection to the vocabulary,
      cross entropy and both gradients are computed piece by piece, so only a single piece's logits exist at a time.
    """

    __pydantic_config__ = STRICT

    family: str = "deepseek_v3"
    flavor: str = "tiny"
    attention: Literal["sdpa", "flex"] = "sdpa"
    layers: int | None = None
    dense_layers: int | None = None
    experts: int | None = None
    top_k: int | None = None
    dim: int | None = None
    heads: int | None = None
    capacity: float | None = None
    folded: bool = False
    loss_pieces: int = 1

    def __post_init__(self) -> None:
        if self.capacity is not None:
            CAPACITY.check("model.capacity", self.capacity)
        LOSS_PIECES.check("model.loss_pieces", self.loss_pieces)
        if self.folded and self.attention != "flex":
            raise CaseError(
                "a folded model has the tokens of all sequences in a single dim, and only a mask keeps them apart",
                expected="model.attention='flex' with model.folded=True",
                found=f"model.attention={self.attention!r}",
            )
        for name, size in self.sizes.items():
            SIZES[name].check(f"model.{name}", size)
        if self.dim is not None and self.dim % DIM_MULTIPLE:
            raise CaseError(
                "the model dim does not suit the kernels of grouped matrix products, whose rows are multiples of 16 "
                "bytes",
                expected=f"a multiple of {DIM_MULTIPLE}",
                found=f"dim={self.dim}",
            )

    @property
    def sizes(self) -> dict[str, int]:
        """The model sizes that the case states, by name; the flavor determines the others."""
        return {name: size for name in SIZES if (size := getattr(self, name)) is not None}


@dataclass(frozen=True, kw_only=True)
class Chunking:
    """Splits the input of some modules in two chunks along a dim. The chunks are computed one after the other.

    - `dim`: "batch", or "seq" for the sequence.
    - `modules`: a pattern for full module names, or several patterns joined by commas. In a pattern, `*` stands for one
      component: `layers.*.moe` matches layers.1.moe. A matching module must not be inside another matching module.
    - `only`: the names of matching modules. If not empty, only these modules are chunked.
    - `early_grad_accumulation`: the gradients of both chunks are added, and the sum is reduced over ranks once.
      Otherwise each chunk's gradient is reduced, and the results are added.
    """

    __pydantic_config__ = STRICT

    dim: Literal["batch", "seq"]
    modules: str
    early_grad_accumulation: bool = False
    only: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        # Python does not enforce `Literal`, and a case may be made without reading a file.
        if self.dim not in ("batch", "seq"):
            raise CaseError("unknown chunking dim", expected="'batch' or 'seq'", found=repr(self.dim))
        check_patterns(self.modules, "a chunking pattern")
        if strangers := [name for name in self.only if root_of(self.modules, name) != name]:
            raise CaseError(
                "only modules that the chunking pattern matches can be chunked",
                expected=f"names that {self.modules} matches",
                found=", ".join(strangers),
            )

    def root_of(self, module: str) -> str | None:
        """Return the chunked module that is or contains `module`, such as layers.1.moe for layers.1.moe.router; None if
        there is none.
        """
        root = root_of(self.modules, module)
        return root if not self.only or root in self.only else None


@dataclass(frozen=True, kw_only=True)
class Parallelism:
    """The number of ranks, and how they share data, layers and experts.

    - `world_size`: the number of all ranks. Parameters are sharded over all of them, unless a field below states
      otherwise.
    - `ep`: the experts are divided among `ep` ranks; rank r has expert coordinate r % ep. The parameters of experts are
      sharded over the ranks with the same experts.
    - `tp`: each layer is split over `tp` ranks, which read the same data; rank r has tensor coordinate r % tp. The
      parts are sharded over the ranks with the same tensor coordinate. Experts are not split: instead these ranks
      divide their tokens among themselves, and each sends its share to the experts.
    - `pp`: a pipeline divides the ranks into `pp` equal parts, and each part has other layers (see `Schedule`). Rank r
      is in part r // (world_size / pp). The fields above then apply within a part.
    - `shared_groups`: process groups over the same ranks are a single object, as in meshes that cache them.
    - `sequence`: outside split layers, each rank of a tensor group has an equal part of the sequence. So a split layer
      begins with an all-gather and ends with a reduce-scatter.
    """

    __pydantic_config__ = STRICT

    world_size: int = 8
    ep: int = 2
    tp: int = 1
    pp: int = 1
    shared_groups: bool = False
    sequence: bool = False

    def __post_init__(self) -> None:
        for name in ("world_size", "ep", "tp", "pp"):
            RANKS.check(f"parallelism.{name}", getattr(self, name))
        # First, since all properties below divide by `pp`.
        if self.world_size % self.pp:
            raise CaseError(
                "a pipeline must divide the world size",
                expected="world_size a multiple of pp",
                found=f"world_size={self.world_size}, pp={self.pp}",
            )
        # Without a pipeline the error speaks of the world size, which a user has set.
        what = "the world size" if self.pp == 1 else "a stage's ranks"
        # Each on its own: experts are not split over tp, so ep and tp need not fit each other.
        for kind, name in (("expert", "ep"), ("tensor", "tp")):
            if self.stage_ranks % getattr(self, name):
                raise CaseError(
                    f"{kind} parallelism must divide {what}",
                    expected=f"{'world_size' if self.pp == 1 else 'world_size / pp'} a multiple of {name}",
                    found=f"world_size={self.world_size}, {f'pp={self.pp}, ' if self.pp > 1 else ''}"
                    f"{name}={getattr(self, name)}",
                )
        if self.sequence and (self.tp == 1 or self.pp > 1):
            raise CaseError(
                "sequence parallelism is for the ranks of a tensor group, and not for the stages of a pipeline",
                expected="tp of at least 2 and pp=1 with sequence=True",
                found=f"tp={self.tp}, pp={self.pp}",
            )

    @property
    def stage_ranks(self) -> int:
        """The number of ranks of a pipeline stage. Without a pipeline, all ranks form a single stage."""
        return self.world_size // self.pp

    @property
    def data_ranks(self) -> int:
        """The number of ranks of a stage that read different data: a tensor group counts as a single rank."""
        return self.stage_ranks // self.tp

    @property
    def expert_fsdp(self) -> int:
        """The number of ranks over which the parameters of the same experts are sharded."""
        return self.stage_ranks // self.ep


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The input of a rank in a step: `sequences` rows, each of `seq_len` tokens, from the text that `data` names.

    Ranks with the same data coordinate, such as a tensor group, read the same documents.
    """

    __pydantic_config__ = STRICT

    sequences: int = 4
    seq_len: int = 32
    data: str = "pydoc"

    def __post_init__(self) -> None:
        SEQUENCES.check("batch.sequences", self.sequences)
        TOKENS.check("batch.seq_len", self.seq_len)


@dataclass(frozen=True, kw_only=True)
class Precision:
    """The dtypes of a step: `compute` for forward and backward, `reduce` for reducing gradients over ranks.

    Parameters are stored in float32.
    """

    __pydantic_config__ = STRICT

    compute: Literal["bfloat16", "float32"] = "bfloat16"
    reduce: Literal["bfloat16", "float32"] = "float32"


@dataclass(frozen=True, kw_only=True)
class Memory:
    """How the graph pipeline treats activations that backward uses: saved, recomputed or offloaded. Eager saves all.

    | policy      | saved                                                      | else                               |
    |-------------|------------------------------------------------------------|------------------------------------|
    | `none`      | everything                                                 |                                    |
    | `selective` | inputs of a block, compute-heavy operators, collectives    | recomputed                         |
    | `full`      | inputs of a block                                          | recomputed                         |
    | `offload`   | as `selective`, but up to `offload_gib` GiB in host memory | recomputed                         |

    - `save` lists operator names, and replaces the operators that `selective` and `offload` save. "attention" is every
      attention operator. A name with /2 saves every second call of a block's forward, from the first: ("mm/2",
      "attention") recomputes every other matrix product, and all other operators.
    - `defer`, with `offload`: the number of blocks that may run before a copy to host memory must have ended. It counts
      whole blocks after the block that used the activation last.
    - `prefetch`, with `offload`: a copy back starts this many blocks before the block whose backward needs it. Larger
      numbers hide slower copies, and keep more activations on the device.

    Every policy saves values outside all blocks, and values that would differ when recomputed, such as random draws.
    harness/graph/passes/tag_memory.py has the rules.
    """

    __pydantic_config__ = STRICT

    policy: Literal["none", "selective", "full", "offload"] = "none"
    offload_gib: float = 1.0
    save: tuple[str, ...] | None = None
    prefetch: int = 1
    defer: int = 1

    def __post_init__(self) -> None:
        if self.policy not in ("none", "selective", "full", "offload"):
            raise CaseError(
                "unknown memory policy", expected="none, selective, full or offload", found=f"policy={self.policy!r}"
            )
        GIB.check("memory.offload_gib", self.offload_gib)
        self._check_save()
        for name in ("prefetch", "defer"):
            BLOCKS_AHEAD.check(f"memory.{name}", getattr(self, name))
            # No other policy reads them, so a stated value would be a mistake.
            if self.policy != "offload" and getattr(self, name) != 1:
                raise CaseError(
                    f"memory.{name} is for activations in host memory",
                    expected="policy='offload', or the default of 1",
                    found=f"policy={self.policy!r}, {name}={getattr(self, name)}",
                )

    def _check_save(self) -> None:
        if self.save is None:
            return
        if self.policy not in ("selective", "offload"):
            raise CaseError(
                "operators are listed for a memory policy that does not choose by operators",
                expected="policy='selective' or policy='offload' with save=(...), or save=None",
                found=f"policy={self.policy!r}, save={self.save!r}",
            )
        if wrong := [entry for entry in self.save if not _SAVED.fullmatch(entry)]:
            raise CaseError(
                "memory.save lists operators by their names, without namespace and overload",
                expected="mm, mm/2 for every second call, attention, ...",
                found=repr(wrong[0]),
            )
        # `mm` and `mm/2` contradict each other, so operators are compared without their counts.
        names = [entry.partition("/")[0] for entry in self.save]
        if twice := [name for name in names if names.count(name) > 1]:
            raise CaseError(
                "memory.save lists an operator twice",
                expected="each operator once",
                found=", ".join(entry for entry in self.save if entry.partition("/")[0] == twice[0]),
            )


@dataclass(frozen=True, kw_only=True)
class AdamW:
    """AdamW's settings. `expert_bias_lr` is how far a step moves each expert's bias toward a balanced load."""

    __pydantic_config__ = STRICT

    lr: float = 3e-3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    expert_bias_lr: float = 1e-3

    def __post_init__(self) -> None:
        for name in ("lr", "eps", "weight_decay", "expert_bias_lr"):
            RATE.check(f"optimizer.{name}", getattr(self, name))
        # JSON has lists in place of tuples.
        if not isinstance(self.betas, (tuple, list)) or len(self.betas) != 2:
            raise CaseError("AdamW has two betas", expected="two numbers", found=f"optimizer.betas={self.betas!r}")
        for place, beta in enumerate(self.betas):
            BETA.check(f"optimizer.betas[{place}]", beta)
