"""Checks a certificate's subject, as far as possible without torch; `--retrace` checks the rest.

1. It contains the case that it names, and a supported version of torch and kind of machine.
2. Both graphs take the same inputs with the same layouts, and return a step's outputs: the loss, and the gradient of
   each parameter. A forger who leaves a gradient out must also leave out its parameter and all its readers. A whole
   step's take the optimizer's state, too, and leave each parameter in its memory.
3. Every collective's groups contain exactly the ranks of the case.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace

from bitproof.harness.certificate.data import ROOTS, STATE, WRITTEN, Certificate, Graph, Tensor
from bitproof.harness.certificate.errors import rejecting, require

PARAMETER, BUFFER, INPUT = ROOTS[0], "buffer ", ROOTS[1]
LOSS, GRADIENT = "loss", "gradient of "


def check_subject(certificate: Certificate) -> None:
    """Compare a certificate's subject with its graphs. Raises RejectedError if they disagree."""
    with rejecting():
        subject = certificate.subject
        if subject is None:
            require(False, "it does not say what it is about")
            return
        case = json.loads(subject.case)
        require(case["name"] == certificate.case, f"it names case {certificate.case}, and holds case {case['name']}")
        require(re.fullmatch("[0-9a-f]{64}", subject.code) is not None, f"{subject.code} is no digest of our code")
        require(re.fullmatch(r"\w+", subject.machine) is not None, f"{subject.machine} is no kind of machine")
        inputs = _inputs(certificate.reference)
        others = _inputs(certificate.candidate)
        names = dict.fromkeys(name for name, _ in sorted({*inputs} ^ {*others}, key=str))
        require(inputs == others, f"the graphs' inputs are not the same, in one order: {', '.join(names)}")
        parameters = [name.removeprefix(PARAMETER) for name, _ in inputs if name.startswith(PARAMETER)]
        outputs = (LOSS, *(GRADIENT + name for name in parameters))
        for told, graph in (("reference", certificate.reference), ("candidate", certificate.candidate)):
            returned = tuple(name for name, _ in graph.outputs)
            unlike = sorted({*returned} ^ {*outputs}) or ["in another order"]
            require(returned == outputs, f"the {told} does not return the step's outputs: {', '.join(unlike)}")
            _check_ranks(graph, case["parallelism"]["world_size"])
        require(subject.outputs == outputs, "its list of outputs is not that of its graphs")
        if certificate.reference.is_whole_step:
            left = {name for name, _ in certificate.answers}
            kept = [name for name in parameters if f"{WRITTEN}{PARAMETER}{name}" not in left]
            require(not kept, f"it takes an optimizer's state, and does not update {', '.join(kept)}")


def covers_any_number(certificate: Certificate) -> bool:
    """Whether a checked certificate shows that any number of steps from equal state has equal bits: it is of a whole
    step, every output is PROVED, and nothing is drawn, so that the next step begins from equal state again."""
    calls = (*certificate.reference.calls, *certificate.candidate.calls)
    is_whole = certificate.reference.is_whole_step
    return is_whole and not any(call.random for call in calls) and {x for _, x in certificate.answers} == {"PROVED"}


def _inputs(graph: Graph) -> list[tuple[str, Tensor]]:
    """A graph's inputs and their layouts: first parameters, buffers, inputs of the step; then an optimizer's state,
    which may come later."""
    found = [(call.name, replace(call.value, storage=0)) for call in graph.calls if call.op == "input"]
    order = (PARAMETER, BUFFER, INPUT, STATE)
    kinds = [next((i for i, kind in enumerate(order) if x.startswith(kind)), -1) for x, _ in found]
    require(-1 not in kinds and kinds == sorted(kinds), "inputs are not parameters, buffers and inputs in this order")
    first = graph.calls[: sum(order[kind] != STATE for kind in kinds)]
    require(all(call.op == "input" for call in first), "inputs do not come first")
    numbers = [x.removeprefix(INPUT) for x, _ in found if x.startswith(INPUT)]
    require(numbers == [str(i) for i in range(len(numbers))], "inputs are not numbered from 0 on")
    return found


def _check_ranks(graph: Graph, world_size: int) -> None:
    for call in graph.calls:
        for name, value in call.args:
            if name == "group_name" and value[0] == "ranks":
                ranks = sorted(rank for group in value[1] for rank in group)
                require(ranks == [*range(world_size)], f"{call.name} is among other ranks than the {world_size}")
