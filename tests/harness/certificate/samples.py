"""Certificates of many kinds, and what the checker says about one: the bytes of its files are all that it sees."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from bitproof.harness import certificate_checker as checker
from bitproof.harness.certificate_checker import FILES, RejectedError, covers_any_number, rejecting
from bitproof.harness.powers.proofs.prover.answers import prove_graphs
from bitproof.harness.powers.proofs.prover.certify import certificate_of, contents_of
from bitproof.harness.powers.proofs.prover.graphs.export import export_graph
from bitproof.harness.powers.proofs.prover.proof_data import Certificate, Subject
from tests.harness.powers.proofs.mutants import copied as copy_of
from tests.harness.powers.proofs.random_programs import NAMES, random_program
from tests.harness.powers.proofs.rewrites import BREAKS, KEEPS
from tests.harness.powers.proofs.test_canonical import copied
from tests.harness.powers.proofs.test_rules import SOUND, UNSOUND
from tests.harness.powers.proofs.toy_graphs import GROUPS, aten, c10d, compare, randn, trace

REJECTED, ANY_NUMBER = "rejected", "any number of steps"
Said = dict[str, int] | str
"""Answers counted by verdict, or REJECTED."""


def check(certificate: Certificate) -> Counter[str]:
    """Have the checker count the answers; leaves out the subject, which tests' own graphs have none of."""
    with rejecting():
        main, *graphs, steps = parsed(contents_of(certificate))
    return checker.check(main, graphs, steps, with_subject=False)


def parsed(contents: dict[str, bytes]) -> list[Any]:
    """The values of the files, the main one first."""
    return [checker.parse(contents[name]) for name in FILES]


def said_of(certificate: Certificate) -> Said:
    """What the checker says about a certificate, its subject included if it has one."""
    return said(contents_of(certificate), subject=certificate.subject is not None)


def said(contents: dict[str, bytes], *, subject: bool = False) -> Said:
    """What it says about files; with `subject`, also about their subject, and whether of any number of steps."""
    try:
        with rejecting():
            main, *graphs, steps = parsed(contents)
            found = dict(checker.check(main, graphs, steps, with_subject=subject))
            return {**found, ANY_NUMBER: int(covers_any_number(main, graphs))} if subject else found
    except RejectedError:
        return REJECTED


W, X = randn(4, 6), randn(4, 6)


def gathered(x):
    return c10d.wait_tensor(c10d.all_gather_into_tensor(x, 2, "pairs"))


def reduced(x):
    return c10d.wait_tensor(c10d.reduce_scatter_tensor(x, "sum", 2, "pairs"))


def parts(w, x):
    y = torch.cat([w[:2] * x[:2], x[2:] * w[2:]])
    loss = (gathered(y.bfloat16()).float().t() @ gathered(w)).sum(0)
    w.add_(y)
    return loss, reduced(y), reduced(w - x), torch.rand_like(w) * x


def whole(w, x):
    """The same as `parts`, by other calls."""
    y = w * x
    narrow = aten._to_copy.default(y, dtype=torch.bfloat16, layout=torch.strided, device=torch.device("cpu"))
    copied = aten.clone.default(w, memory_format=torch.contiguous_format)
    both = gathered(torch.cat([narrow.float().view(-1), copied.view(-1)])).view(2, -1)
    ys, ws = aten.split_with_sizes_copy(both, [24, 24], 1)
    loss = (ys.view(8, 6).t() @ ws.view(8, 6)).sum(0)
    w.copy_(w + x * w)
    rows = reduced(torch.cat([y.view(2, -1), (w - x).view(2, -1)], 1)).view(-1)
    return loss, rows[:12].view(2, 6), rows[12:].view(2, 6), torch.rand_like(w) * x


def rows_where(w, x):
    """As many rows as data say."""
    return w.index_select(0, x.nonzero().view(-1)[: x.sum().item()]) if x.dtype == torch.int64 else w


def exchanged(x):
    return c10d.wait_tensor(c10d.all_to_all_single(x, [2, 2], [2, 2], "pairs"))


def written(w, x):
    y = w * x
    y.view(-1).mul_(2)
    y[0].add_(x[0])
    w.sub_(x)
    z = torch.empty_like(w).copy_(x)
    z.zero_()
    return y + z, w * z, x.new_full((2, 6), 0.5) * w[:2]


def joined(w, x):
    y = torch.stack([w, x, w + x], 1)
    z = aten.constant_pad_nd.default(y, [1, 2, 0, 1], 0.5)
    first, second = torch.cat([z, z * 2], 0).split([3, 5])
    return torch.cat([second, first])[5:] * 1.0, z.expand(2, 4, 4, 9)[1].permute(2, 0, 1) - 1, y.unbind(1)[2]


def carried(w, x):
    index = (x[:, 0] > 0).long()
    return w.flip(0).roll(1, 1) + x.gather(0, index[:, None].expand(4, 6)), w[index] * x.tril(), w.repeat(2, 1)


def several(w, x):
    values, indices = (w + x).sort()
    means = torch.native_layer_norm(w, [6], x[0], x[1], 1e-5)
    return values[indices[0]], means[0] / means[2], torch.rand_like(w) + torch.randn(4, 6), w / x[:, :1], w / x[0]


def open_rows(w, x):
    rows = w.index_select(0, x.nonzero().view(-1))
    return (rows * 1.5).sum(0), (rows.reshape(-1) + 1).sum(), rows.new_zeros(rows.shape).sum() + w.sum()


def open_sum(w, x):
    return c10d.wait_tensor(c10d.all_reduce(w.index_select(0, x.nonzero().view(-1)), "sum", "pairs")).sum(0)


def normed(w, x):
    mean, var = x[0].clone(), x[1].clone()
    y = torch.nn.functional.batch_norm(w, mean, var, training=True)
    return y + w, mean * 1.5 + w[0], var * w[1]


def updated(w, x, count, mean, square):
    """A whole step: its loss, its gradient, and what an optimizer's kernel writes."""
    grad = (w * x).sum() * x
    rates = {"lr": 0.5, "beta1": 0.5, "beta2": 0.75, "weight_decay": 0.0, "eps": 1.0, "amsgrad": False}
    aten._fused_adamw_.default([w], [grad], [mean], [square], [], [count], **rates, maximize=False)
    return (w * x).sum(), grad


def updated_alike(w, x, *state):
    """The same with operands exchanged."""
    return updated(w, x * 1.0, *state)


def set_anew(w, x, count, mean, square):
    """The same, after which some state is a number, whatever it was before."""
    found = updated(w, x, count, mean, square)
    mean.fill_(2)
    return found


def of_a_whole_step(
    one: Callable[..., Any], two: Callable[..., Any], state: Sequence[str] = ("count", "mean", "square")
) -> Certificate:
    """The certificate of two functions of a parameter, an input and an optimizer's state, first a number."""
    inputs = (W, X, torch.tensor(1.0), W * 0, X * 0)[: 2 + len(state)]
    names = ("parameter w", "input 0", *(f"optimizer w.{name}" for name in state))
    graphs = [export_graph(trace(x, inputs), names, inputs, ("loss", "gradient of w"), GROUPS) for x in (one, two)]
    case = json.dumps({"name": "whole step", "parallelism": {"world_size": 2}})
    subject = Subject(case, "0" * 64, torch.__version__, "x86_64", ("loss", "gradient of w"))
    return certificate_of("whole step", prove_graphs(*graphs, must_read=()), subject)


STEPS = (written, normed, joined, carried, several, lambda w, x: exchanged(w * x) + gathered(w[:2]), copied())
LATE = [{"wait_offload": False}, {"wait_reload": False}, {"write": "source"}, {"write": "arrival"}, {"keep": False}]


def by_hand(dtypes: Sequence[torch.dtype] = (torch.float32, torch.bfloat16)) -> Iterator[Certificate]:
    """Certificates of the tests' own steps: most rules, most kinds of calls, what is refused."""
    ones = torch.ones(4, dtype=torch.int64)
    yield certificate_of("example", compare(parts, whole, W, X))
    yield certificate_of("moved", compare(lambda w, x: reduced(w) + reduced(x), lambda w, x: reduced(w + x), W, X))
    for step in STEPS:
        yield certificate_of("step", compare(step, step, W, X))
    for step in (open_rows, open_sum):
        yield certificate_of("open", compare(step, step, W, ones))
    for one, two in ((updated, updated_alike), (set_anew, set_anew), (updated, set_anew)):
        yield of_a_whole_step(one, two)
    for wrong in LATE:
        yield certificate_of("late", compare(copied(), copied(**wrong), W, X))
    for dtype in dtypes:
        for one, two in [pair for pairs in SOUND.values() for pair in pairs] + UNSOUND:
            yield certificate_of("rule", compare(one, two, randn(12, 6, dtype=dtype), randn(12, 6, dtype=dtype)))


def of_random_programs(seed: int) -> Iterator[Certificate]:
    """Certificates of random programs against a mutant of each, without end; what is refused as a whole is left out."""
    chance = random.Random(seed)
    while True:
        try:
            program = random_program(chance)
            outputs = [f"out {i}" for i in range(len(program.module.graph.output_node().args[0]))]
            both = program.module, _mutant(program.module, chance)
            graphs = [export_graph(x, NAMES, program.like, outputs, GROUPS) for x in both]
            proof = prove_graphs(*graphs)
        except Exception:  # torch or the prover refuses it
            continue
        yield certificate_of("random", proof)


def _mutant(module: GraphModule, chance: random.Random) -> GraphModule:
    """The program with a change that keeps its bits, or does not; itself where none applies."""
    known = KEEPS | BREAKS
    for _ in range(40):
        mutant = copy_of(module)
        calls = [node for node in mutant.graph.nodes if node.op == "call_function"]
        if known[chance.choice(sorted(known))](mutant, chance, chance.choice(calls)):
            break
    return mutant
