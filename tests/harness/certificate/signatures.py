"""The arguments of all operators that a proof may admit, from torch's schemas: the checker's table `SIGNATURES`.

`python tests/harness/certificate/signatures.py` writes the table into the checker, e.g. after `admitted.txt` changed.
"""

from __future__ import annotations

import re
import sys
import textwrap
from pathlib import Path

import torch
import torch._inductor.inductor_prims  # declares operators that a proof admits

from bitproof.harness import certificate_checker as checker
from bitproof.harness.graph import offload_operators  # noqa: F401  # declares bitproof's own operators
from bitproof.harness.graph.backend.allowed import ALLOWED
from bitproof.harness.powers.proofs.prover import known_operators as known
from bitproof.harness.powers.proofs.prover.graphs import admitted
from bitproof.harness.torch_compat import OpOverload

IMPLIED = {*known.RESHAPES, known.SPLIT, *known.COPIES}
"""Operators whose first argument alone must be recorded: the result's layout implies all others, but for dims."""

QUOTES = '"""'


def operators() -> list[str]:
    """The full names of torch's and bitproof's operators that a certificate's graphs may call with a value."""
    counted = {**known.FUSED, **known.BATCH_NORMS}
    own = {*counted, *counted.values(), "aten.native_dropout.default", *known.DRAWS, *known.REFUSED, *known.FILLS}
    own |= {name for packet in known.UNINITIALIZED for name in _overloads(packet)}
    refused = {name for name in own if name.startswith(checker.REFUSED)} - checker.UNDERSTOOD
    return sorted({*admitted.names(), *own, *(x for x in ALLOWED if x.startswith(checker.TORCHS))} - refused)


def _overloads(packet: str) -> list[str]:
    found = getattr(torch.ops.aten, packet, None)
    return [f"aten.{packet}.{end}" for end in found.overloads()] if found is not None else []


def operator_named(name: str) -> OpOverload | None:
    """An operator by its full name; None if this torch has none."""
    namespace, packet, end = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet, None), end, None)


def signature_of(name: str, operator: OpOverload) -> str:
    """The names of its arguments in order, with `?` behind those that a certificate may leave out.

    For example, `self other alpha?` for `aten.add.Tensor`.
    """
    arguments = operator._schema.arguments
    needed = {x.name for x in arguments if not x.has_default_value()}
    if name in IMPLIED:
        needed = {arguments[0].name}
    if name in known.FILLS:  # a fill is recorded with its number alone, or with the tensor that it fills
        needed = {x.name for x in arguments if x.name == known.FILLS[name] or x.alias_info is not None}
    return " ".join(x.name + "?" * (x.name not in needed) for x in arguments)


def table() -> str:
    """The table: each signature, and behind a colon its operators, in short."""
    rows: dict[str, list[str]] = {}
    for name in operators():
        if (operator := operator_named(name)) is not None:
            rows.setdefault(signature_of(name, operator), []).append(_short(name))
    text = " ".join(f"{signature}: {' '.join(names)};" for signature, names in sorted(rows.items()))
    return textwrap.fill(text, 119, break_on_hyphens=False, break_long_words=False)


def _short(name: str) -> str:
    """A name without `aten.` and `.default`, where the checker adds them."""
    return re.sub(r"^aten\.(\w+)(?:\.default|(\.\w+))$", r"\1\2", name)


def main() -> None:
    """Write the table."""
    path = Path(checker.__file__)
    source = path.read_text()
    begin = source.index(f"SIGNATURES = {QUOTES}") + len(f"SIGNATURES = {QUOTES}")
    path.write_text(f"{source[:begin]}\\\n{table()}\n{source[source.index(QUOTES, begin) :]}")


if __name__ == "__main__":
    sys.exit(main())
