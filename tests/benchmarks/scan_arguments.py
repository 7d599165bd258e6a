"""Which arguments mean the same in two forms? `scan_arguments.py [--write] [--samples N] [NAME ...]`.

Each admitted overload of aten and prims with a dim, or with a number beside tensors, is called twice on real values:
with a dim from the start and from the end, for every dim; with several dims in both orders; with a number as a whole
and as a real one. Calls are torch's own samples, forward and backward (`scan_calls.py`), in float32
and with their real tensors cast to bfloat16 and float64. A form is listed if results agreed in bits, dtypes, shapes and
strides in LEAST pairs of calls or more, and never differed. Status 1: a listed form differed. `--write` writes the list
(`harness/powers/proofs/prover/graphs/argument_forms.txt`) anew.
"""

from __future__ import annotations

import argparse
import faulthandler
import itertools
import json
import logging
import os
import signal
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

sys.path.insert(0, str(Path(__file__).parents[2]))

from bitproof.harness.machine.determinism import set_determinism
from bitproof.harness.powers.proofs.prover.graphs import admitted, argument_forms
from bitproof.harness.powers.proofs.prover.graphs.size_checks import sizes_misfit
from bitproof.harness.torch_compat import OpOverload
from tests.harness.powers.proofs.scan import replaced
from tests.harness.powers.proofs.scan_calls import by_stem, calls_of, operators, recorded
from tests.harness.powers.proofs.scan_variants import Arguments, by_name, tensors_of

LEAST, SECONDS = 4, 60
DIMS = ("dim", "dims")
IN_TURN = ("fft", "rot90", "linalg_matrix", "linalg_norm", "hash")
"""Parts of names of operators that take one dim after the other: a few calls that agree show nothing."""

NUMBERS = (0, 1, 2, 3, -1)
DTYPES = (torch.float32, torch.bfloat16, torch.float64)

Form = tuple[str, str, str]


def pairs_of(op: OpOverload, args: Arguments) -> Iterator[tuple[Form, dict[str, Any], dict[str, Any]]]:
    """Each form with a call in both ways to write it."""
    given, tensors, first = by_name(op, args), tensors_of(args), op._schema.arguments[0]
    if not tensors or str(first.type) != "Tensor":
        return
    rank = max(tensors[0].dim(), 1)
    for argument in op._schema.arguments:
        name, kind = argument.name, str(argument.type)
        if name in DIMS and kind in ("int", "Optional[int]"):
            for dim in range(rank):
                yield ("dim", str(op), name), given | {name: dim}, given | {name: dim - rank}
        elif name in DIMS and "List[int]" in kind:
            for count in range(1, min(rank, 3) + 1):
                for dims in itertools.permutations(range(rank), count):
                    here = given | {name: [*dims]}
                    yield ("dim", str(op), name), here, given | {name: [dim - rank for dim in dims]}
                    if count > 1 and not any(part in str(op) for part in IN_TURN):
                        yield ("order", str(op), name), given | {name: sorted(dims)}, here
        elif kind in ("number", "Optional[number]") and len({x.dtype for x in tensors}) == 1:
            for number in NUMBERS if tensors[0].is_floating_point() else ():
                yield ("number", str(op), name), given | {name: number}, given | {name: float(number)}


def agree(op: OpOverload, one: dict[str, Any], other: dict[str, Any]) -> bool | None:
    """Whether two calls do the same; None if neither runs."""
    found = []
    for given in (one, other):
        own = replaced(((), given), lambda x: x.clone(memory_format=torch.preserve_format))
        try:
            results = pytree.tree_leaves(op(**own[1]))
        except Exception:
            results = None
        found.append(None if results is None else [*results, *tensors_of(own)])
    if found[0] is None or found[1] is None:
        return None if found[0] is found[1] else False
    return len(found[0]) == len(found[1]) and all(map(_same, *found))


def _same(x: Any, y: Any) -> bool:
    if not isinstance(x, Tensor) or not isinstance(y, Tensor):
        return type(x) is type(y) and (x == y or x != x)
    if (x.dtype, x.shape, x.stride(), x.storage_offset()) != (y.dtype, y.shape, y.stride(), y.storage_offset()):
        return False
    if x.layout != torch.strided or x.is_conj() or x.is_neg():
        return False
    flat = [torch.empty(z.numel(), dtype=z.dtype).copy_(z.reshape(-1)).view(torch.uint8) for z in (x, y)]
    return torch.equal(*flat) or bool(torch.isclose(x, y, rtol=0, atol=0, equal_nan=True).all())


def tried(op: OpOverload, calls: Sequence[Arguments]) -> list[tuple[Form, int, int, str | None]]:
    """For each form of an operator, how often two calls agreed and differed, and one that differed."""
    agreed, differed, example = Counter[Form](), Counter[Form](), dict[Form, str]()
    for args, dtype in itertools.product(calls, DTYPES):
        own = replaced(args, lambda x, dtype=dtype: x.to(dtype) if x.dtype == torch.float32 else x)
        for form, one, other in pairs_of(op, own):
            if sizes_misfit(str(op), one) or sizes_misfit(str(op), other):
                continue
            with torch.no_grad():
                found = agree(op, one, other)
            if found is not None:
                (agreed if found else differed)[form] += 1
            if found is False:
                example.setdefault(form, str({k: v for k, v in other.items() if not isinstance(v, Tensor)}))
    return [(form, agreed[form], differed[form], example.get(form)) for form in agreed | differed]


def apart(op: OpOverload, calls: Sequence[Arguments]) -> Any:
    """The same in a process of its own, which an operator may end: then None."""
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        signal.alarm(SECONDS)
        faulthandler.disable()
        with os.fdopen(writer, "w") as pipe:
            pipe.write(json.dumps(tried(op, calls)))
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    return json.loads(text) if status == 0 else None


def main() -> int:
    """Scan, print, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--write", action="store_true", help="write the list of forms anew")
    parser.add_argument("--samples", type=int, default=6, help="of torch's samples of each operator")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    set_determinism(0, fill_uninitialized=False)
    calls = recorded(given.samples)
    stems = by_stem(calls, operators())
    agreed, differed, example, ended = Counter[Form](), Counter[Form](), dict[Form, str](), list[str]()
    for op in operators():
        if str(op) not in admitted.names() or (given.names and str(op) not in given.names):
            continue
        is_of_forms = any(x.name in DIMS or "number" in str(x.type) for x in op._schema.arguments)
        if is_of_forms and torch.Tag.nondeterministic_seeded not in op.tags:
            found = apart(op, calls_of(op, calls, stems))
            if found is None:
                ended.append(str(op))
            for form, alike, unlike, such in found or ():
                agreed[tuple(form)] += alike
                differed[tuple(form)] += unlike
                if such:
                    example[tuple(form)] = such
    honest = {form for form, count in agreed.items() if count >= LEAST and not differed[form]}
    print(f"operators that end their process: {', '.join(ended) or 'none'}")
    print("| form | operator | argument | differed | agreed | such a call |\n|---|---|---|---|---|---|")
    for form, count in sorted((+differed).items()):
        print(f"| {' | '.join(form)} | {count} | {agreed[form]} | `{example[form][:120]}` |")
    print(
        f"\ntorch {torch.__version__}: {sum(agreed.values())} pairs of calls agreed, {sum(differed.values())} differed"
    )
    for kind in argument_forms.FORMS:
        forms = [form for form in agreed if form[0] == kind]
        pairs = sum(agreed[form] for form in forms)
        print(
            f"  {kind}: {pairs} pairs of {len(forms)} arguments; {sum(f in honest for f in forms)} did the same always"
        )
    wrong = sorted(form for form in argument_forms.listed() if differed[form])
    print(f"listed: {len(argument_forms.listed())}; of these differed: {wrong or 'none'}")
    if given.write:
        kept = {form for form in argument_forms.listed() if given.names and form[1] not in given.names}
        argument_forms.write(honest | kept)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
