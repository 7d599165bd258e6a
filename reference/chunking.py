"""Runs chosen modules of an eager model in two chunks. Graphs that are split into chunks must return the same bits.

1. Split the activation along batch or sequence. Split positions and attention masks likewise.
2. Call the module's own forward on the first half, then on the second.
3. Concatenate the two outputs along the same dim.

For example, a batch of 4 sequences becomes two calls, with sequences 0 and 1, and with 2 and 3.

Folded activations (T, D) have the tokens of all sequences in dim 0, which is split:

- "batch" splits between two sequences, so that each chunk has whole documents.
- "seq" may split within a document, but only in modules that treat each token alone.

ChunkError is raised for an input that cannot be split, and for a chosen module that never runs. Without that error, the
step would silently run without chunks.
"""

# B batch, S sequence, T folded tokens, D model dim

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from bitproof.harness.case import Chunking, pattern_of
from bitproof.harness.errors import ChunkError
from bitproof.harness.torch_compat import FakeTensor, disable_current_modes
from bitproof.reference.layers.document_mask import mask_mod_of
from bitproof.reference.layers.moe import MoE

Inspect = Callable[[str, nn.Module, Callable[..., Any], Mapping[str, Any]], None]

_running_chunk: ContextVar[int | None] = ContextVar("running_chunk", default=None)


def running_chunk() -> int | None:
    """Return the index of the chunk whose forward runs now, 0 or 1; None outside chunks."""
    return _running_chunk.get()


class ChunkedModules:
    """Runs the modules `names` of a model in two chunks.

    Checks that each step runs each of them as often as the first step.
    """

    def __init__(
        self, model: nn.Module, chunking: Chunking, names: list[str], inspect_module: Inspect | None, folded: bool
    ) -> None:
        self.names = names
        self._chunking = chunking
        # Calls of the current step; those of the first step, which every later step must repeat; all modules that the
        # first step has called.
        self._num_calls: Counter[str] = Counter()
        self._of_first_step: dict[str, int] | None = None
        self._called: set[str] = set()
        self._hooks = [
            module.register_forward_pre_hook(lambda module, _, name=name: self._called.add(name))
            for name, module in model.named_modules()
            if name
        ]
        """Hooks that note which modules run in the first step, for an error to list them. `end_step` removes them."""
        for name in names:
            module = model.get_submodule(name)
            # As an attribute of the object it hides the class's `forward`. Hooks run around both chunks together.
            module.forward = _ChunkedForward(name, module.forward, chunking.dim, self._count, folded)
            if inspect_module is not None:
                module.forward.inspect = partial(inspect_module, name, module)

    def end_step(self, index: int) -> dict[str, int]:
        """Return module name -> how often the module ran in step `index`. A run of both chunks counts once.

        Raises ChunkError if a module did not run, or if it ran more or less often than in the first step.
        """
        num_calls = {name: self._num_calls[name] for name in self.names}
        self._num_calls.clear()
        while self._hooks:
            self._hooks.pop().remove()
        if idle := [name for name, calls in num_calls.items() if not calls]:
            running = sorted({pattern_of(name) for name in self._called.difference(idle)})
            raise ChunkError(
                f"{', '.join(idle)} matches the chunking pattern {self._chunking.modules!r} but did not run in "
                f"step {index}",
                expected="a pattern of modules that the step calls: " + (", ".join(running) or "there are none"),
                found="no call of " + ", ".join(idle),
                fix="correct `modules` in the case's Chunking",
            )
        self._of_first_step = self._of_first_step or num_calls
        if other := [name for name in self.names if num_calls[name] != self._of_first_step[name]]:
            raise ChunkError(
                f"{', '.join(other)} did not run as often in step {index} as in the first",
                expected="calls: " + ", ".join(f"{name} {self._of_first_step[name]}" for name in other),
                found="calls: " + ", ".join(f"{name} {num_calls[name]}" for name in other),
                fix="chunk modules that every step calls equally often",
            )
        return num_calls

    def _count(self, name: str) -> None:
        self._num_calls[name] += 1


def check_chunking(model: nn.Module, chunking: Chunking, *, folded: bool = False) -> None:
    """Raise ChunkError if `chunking` cannot be applied to this model, which may be on the meta device. The reasons are:

    - No module matches.
    - A module mixes positions, and would get half of a sequence.
    - A module has a norm that mixes the rows of a batch or updates running statistics.
    - A module is within a mixture of experts, where inputs have neither a batch nor a sequence.
    """
    for name in chunk_modules(model, chunking, folded=folded).names:
        # All modules around it, innermost first; the last is the root, with an empty name.
        parents = [name.rpartition(".")[0]]
        while parents[-1]:
            parents.append(parents[-1].rpartition(".")[0])
        experts = next((each for each in parents if each and isinstance(model.get_submodule(each), MoE)), None)
        if experts is not None:
            raise ChunkError(
                f"cannot chunk {name}: {experts} gives it rows of tokens",
                expected=f"a module that takes {_expected_activation(folded)}",
                found=f"the pattern {chunking.modules!r}",
                fix=f"choose {pattern_of(experts)}, or a module around it",
            )
        _refuse_statistics(name, model.get_submodule(name), chunking)


_BATCH_NORMS = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(nn.LazyBatchNorm1d, nn.LazyBatchNorm2d, nn.LazyBatchNorm3d),
)
_INSTANCE_NORMS = (
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
    *(nn.LazyInstanceNorm1d, nn.LazyInstanceNorm2d, nn.LazyInstanceNorm3d),
)


def _refuse_statistics(name: str, module: nn.Module, chunking: Chunking) -> None:
    """Raise ChunkError if a module has a norm that mixes the rows of a batch, or that updates running statistics.

    The reason: a chunk has only half of the rows, and each of the two chunks would update the statistics.
    """
    for below, part in module.named_modules(prefix=name):
        # A batch norm mixes rows when it computes statistics: in training, or if it keeps none. An instance norm never
        # mixes rows, but may update running statistics.
        computes = isinstance(part, _BATCH_NORMS) and (part.training or part.running_mean is None)
        updates = isinstance(part, _INSTANCE_NORMS) and part.training and part.track_running_stats
        if computes or updates:
            raise ChunkError(
                f"cannot chunk {name}: {below} is a {type(part).__name__}, whose statistics would be of one chunk",
                expected="norms without statistics over rows: nn.RMSNorm, nn.LayerNorm, along batch also nn.GroupNorm",
                found=f"{below}, {'in training' if part.training else 'without running statistics'}",
                fix=f"choose modules without {pattern_of(below)}, or another norm",
            )


def chunk_modules(
    model: nn.Module, chunking: Chunking, inspect_module: Inspect | None = None, *, folded: bool = False
) -> ChunkedModules:
    """Make every module of `model` that matches `chunking.modules` run in two chunks.

    - `inspect_module`: called before a module's first chunk runs, with the module's name, the module, its own forward,
      and the arguments by name. It may raise.
    - `folded`: True if activations are (T, D), with the tokens of all sequences in dim 0.

    Raises ChunkError if no module matches, or if `chunking` would split sequences in a module that mixes positions.
    """
    names = [name for name, _ in model.named_modules() if name and chunking.root_of(name) == name]
    if not names:
        known = sorted({pattern_of(name) for name, _ in model.named_modules() if name})
        raise ChunkError(
            f"the chunking pattern {chunking.modules!r} matches no module",
            expected="one of the model's module patterns: " + ", ".join(known),
            found="no match",
            fix="correct `modules` in the case's Chunking",
        )
    if missing := set(chunking.only) - set(names):
        raise ChunkError(
            f"{', '.join(sorted(missing))} cannot be chunked, as the model has no such module",
            expected=f"modules of the model that {chunking.modules} matches",
            found=f"only={chunking.only}",
            fix="correct `only` in the case's Chunking",
        )
    return ChunkedModules(model, chunking, names, inspect_module, folded)


class _ChunkedForward:
    """A module's forward, which runs once per chunk. After both chunks, it calls `on_call` with the module's name."""

    def __init__(
        self, name: str, forward: Callable[..., Any], dim: str, on_call: Callable[[str], None], folded: bool
    ) -> None:
        self.name = name
        self.forward = forward
        self.on_call = on_call
        self.folded = folded
        # Folded tokens have a single dim, which both kinds of chunking split.
        self.dim = 0 if dim == "batch" or folded else 1
        self.inspect: Callable[..., None] | None = None
        self.signature = inspect.signature(forward)
        self.activation, *others = self.signature.parameters
        # Positions and masks relate the tokens of a sequence to each other.
        if dim == "seq" and any(_role(other) for other in others):
            raise ChunkError(
                f"cannot chunk {name} along the sequence: it takes {', '.join(others)}, so it mixes positions",
                expected="a module that treats each token alone, such as layers.*.moe",
                found=f"forward{self.signature}",
                fix="chunk along batch, or choose modules='layers.*.moe'",
            )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if running_chunk() is not None:
            raise ChunkError(
                f"cannot chunk {self.name}: it runs within another module that is chunked",
                expected="chosen modules that do not call each other",
                found=f"a call of {self.name} in chunk {running_chunk()}",
                fix="correct `modules` in the case's Chunking, or name the outer modules in `only`",
            )
        arguments = self.signature.bind(*args, **kwargs).arguments
        extent = self._checked_extent(arguments[self.activation])
        # Once, before the first chunk runs: the check may trace the whole forward.
        if self.inspect is not None:
            self.inspect(self.forward, arguments)
            self.inspect = None
        halves = {name: self._halves(name, value, extent) for name, value in arguments.items()}
        outputs = [self._run(i, {name: pair[i] for name, pair in halves.items()}) for i in (0, 1)]
        joined = self._join(outputs[0], outputs[1], extent // 2)
        self.on_call(self.name)
        return joined

    def _run(self, index: int, half: dict[str, Any]) -> Any:
        before = _running_chunk.set(index)
        try:
            return self.forward(**half)
        finally:
            _running_chunk.reset(before)

    def _checked_extent(self, x: Any) -> int:
        if not isinstance(x, Tensor) or x.dim() != (2 if self.folded else 3) or not x.is_floating_point():
            raise ChunkError(
                f"cannot split `{self.activation}` of {self.name}",
                expected=_expected_activation(self.folded),
                found=_describe(x),
            )
        extent = x.shape[self.dim]
        if extent % 2:
            raise ChunkError(
                f"cannot split `{self.activation}` of {self.name} in two along dim {self.dim}",
                expected="an even extent",
                found=f"{extent}, in {_describe(x)}",
                fix="choose an even number of tokens in the case"
                if self.folded
                else "choose an even number of sequences (batch) or sequence length (seq) in the case",
            )
        return extent

    def _halves(self, name: str, value: Any, extent: int) -> tuple[Any, Any]:
        if name == self.activation or _role(name) == "positions":
            # Folded positions are (T,), others (B, S).
            least = 1 if self.folded else 2
            if isinstance(value, Tensor) and value.dim() >= least and value.shape[self.dim] == extent:
                return _halves_of(value, self.dim)
        elif _role(name) == "masks":
            return self._mask_halves(name, value, extent)
        elif value is None:
            return None, None
        raise ChunkError(
            f"cannot split argument `{name}` of {self.name}",
            expected=f"the activation, positions of extent {extent} along dim {self.dim}, or attention masks",
            found=_describe(value),
        )

    def _mask_halves(self, name: str, mask: Any, extent: int) -> tuple[Any, Any]:
        if mask is None:
            return None, None
        if isinstance(mask, dict):
            pairs = {key: self._mask_halves(f"{name}[{key!r}]", item, extent) for key, item in mask.items()}
            first, second = ({key: pair[i] for key, pair in pairs.items()} for i in (0, 1))
            return first, second
        if self.folded:
            return self._offset_halves(name, mask, extent)
        if isinstance(mask, BlockMask) and mask.kv_num_blocks.shape[0] in (1, extent):
            return _block_mask_half(mask, 0, extent), _block_mask_half(mask, extent // 2, extent)
        raise ChunkError(
            f"cannot split attention mask `{name}` of {self.name}",
            expected=f"None, a BlockMask of batch 1 or {extent}, or a dict of them",
            found=_describe(mask),
        )

    def _offset_halves(self, name: str, offsets: Any, extent: int) -> tuple[Tensor, Tensor]:
        """Split the offsets of folded tokens in two. A token's offset is the index of the first token of its document.

        Raises ChunkError if a document has tokens in both halves.
        """
        if not isinstance(offsets, Tensor) or offsets.shape != (extent,) or offsets.is_floating_point():
            raise ChunkError(
                f"cannot split attention mask `{name}` of {self.name}",
                expected=f"None, the offset of each token's document as integers of shape ({extent},), or a dict of "
                "them",
                found=_describe(offsets),
            )
        if not isinstance(offsets, FakeTensor):  # a trace has no values
            self._refuse_cut_document(offsets, extent // 2)
        return _halves_of(offsets, 0)

    def _refuse_cut_document(self, offsets: Tensor, half: int) -> None:
        # These calls are not part of the step's log.
        with disable_current_modes():
            last, first = offsets[half - 1 : half + 1].tolist()
        if last == first:
            raise ChunkError(
                f"cannot cut {self.name} into chunks inside a document, whose tokens attend to each other",
                expected=f"a document that begins with token {half}, the first of chunk 1",
                found=f"tokens {half - 1} and {half} in the document with offset {first}",
                fix="end documents with their sequences, or choose modules that treat each token alone",
            )

    def _join(self, first: Any, second: Any, half: int) -> Any:
        if isinstance(first, Tensor) and isinstance(second, Tensor):
            if all(x.dim() > self.dim and x.shape[self.dim] == half for x in (first, second)):
                return torch.cat([first, second], self.dim)
        elif isinstance(first, (tuple, list)) and type(first) is type(second) and len(first) == len(second):
            return type(first)(self._join(a, b, half) for a, b in zip(first, second, strict=True))
        elif first is None and second is None:
            return None
        raise ChunkError(
            f"cannot concatenate the chunks' outputs of {self.name}",
            expected=f"tensors of extent {half} along dim {self.dim}, or tuples and lists of them",
            found=f"{_describe(first)} and {_describe(second)}",
        )


def _expected_activation(folded: bool) -> str:
    return "a floating-point tensor of rank " + (
        "2 (tokens, model dim)" if folded else "3 (batch, sequence, model dim)"
    )


def _role(argument: str) -> str | None:
    if argument.startswith("positions"):
        return "positions"
    return "masks" if argument.startswith("attention_mask") else None


def _halves_of(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    # Not `narrow`: its backward pads both gradients with zeros and adds them, so that -0.0 would become 0.0. The
    # backward of `split` concatenates them.
    first, second = x.split(x.shape[dim] // 2, dim)
    # As the module's own input would be.
    return first.contiguous(), second.contiguous()


def _block_mask_half(mask: BlockMask, first: int, extent: int) -> BlockMask:
    """Return a BlockMask for half of a batch with `extent` rows: `extent / 2` rows, from row `first` on.

    Its mask_mod still reads tensors of the whole batch.
    """

    def rows(blocks: Tensor) -> Tensor:
        # A mask of batch 1 applies to every row.
        return blocks if blocks.shape[0] == 1 else blocks.narrow(0, first, extent // 2)

    def rows_if_any(blocks: Tensor | None) -> Tensor | None:
        return None if blocks is None else rows(blocks)

    return BlockMask.from_kv_blocks(
        rows(mask.kv_num_blocks),
        rows(mask.kv_indices),
        rows_if_any(mask.full_kv_num_blocks),
        rows_if_any(mask.full_kv_indices),
        BLOCK_SIZE=mask.BLOCK_SIZE,
        mask_mod=mask_mod_of(mask).from_row(first),
        seq_lengths=mask.seq_lengths,
    )


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype} tensor of shape {tuple(value.shape)}"
    return type(value).__name__
