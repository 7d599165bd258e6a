"""Faults in a step with micro-batches and pipeline stages: in messages, values kept for backward, sums, and parameters
that stages share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from bitproof.harness.disturb.entry import ANY, BFLOAT16, FLOAT32, MICRO_BATCHES, PIPELINED, Need, Site, row, steps
from bitproof.harness.disturb.faults.clock import NOW

OF_OTHERS = "ours: messages and kept values are found by an index"
SUMS = "ours: sums of floats depend on their order"

SHARED = Need(
    lambda case: case.schedule is not None and (case.schedule.tied or case.schedule.shared is not None),
    "a parameter that two stages share",
)

GATHERS_ONCE = Need(
    lambda case: case.schedule is not None and case.schedule.gathers_once, "parameters that are gathered once a step"
)
REDUCTIONS_ONCE = Need(
    lambda case: case.schedule is not None and case.schedule.reductions_once,
    "gradients that are reduced once a step",
)

DIVIDED = Need(lambda case: case.schedule is not None and case.schedule.divides_backward, "a backward that is divided")
IN_V = Need(lambda case: case.stage_map.is_v, "a pipeline in a V, whose last rank has two neighbouring stages")

Step = Any
"""A `StagedStep`, whose methods a fault replaces."""

_IN = (PIPELINED,)
_IN_BOTH = (PIPELINED, SHARED)
_READS = (Site(ANY, "forward", None, "_to_copy"),)
"""The first call of a stage's norm: it reads the activation that the stage receives."""
_ADDS = (Site(ANY, "backward", None, "add"),)
_ADDS_IN_PLACE = (Site(ANY, "backward", None, "add_"),)  # eager adds in place; the candidate leaves these calls out


def _exchange_first_two(action: Any) -> Any:
    # `^ 1` exchanges 0 and 1. Later micro-batches stay.
    return action._replace(micro_batch=action.micro_batch ^ 1 if action.micro_batch < 2 else action.micro_batch)


def _replace_receive(step: Step, half: str, other: Callable[..., Any]) -> None:
    own = step.receive
    step.receive = lambda sender, *args: other(own, sender, *args) if sender.half == half else own(sender, *args)


def _replace_sent(step: Step, half: str, other: Callable[[Any], Any]) -> None:
    own = step.send
    step.send = lambda action, index, value: own(action, index, other(value) if action.half == half else value)


def _replace_input(step: Step, place: int) -> None:
    # The graph's last inputs are tokens, labels and positions.
    own, name = step.inputs, step.parts.placeholders[place]

    def inputs(action: Any, micro_batches: Any) -> Any:
        return {**own(action, micro_batches), name: own(_exchange_first_two(action), micro_batches)[name]}

    step.inputs = inputs


@row(OF_OTHERS, runner=True, needs=_IN, sites=(Site(ANY, "forward", None, "recv_"),))
def activation_of_another_micro_batch(step: Step) -> None:
    """a stage receives the activations of the first two micro-batches in exchanged order."""
    _replace_receive(step, "forward", lambda own, sender, *args: own(_exchange_first_two(sender), *args))


@row(OF_OTHERS, runner=True, needs=_IN, kinds=("grad",), sites=(Site(ANY, "backward", None, ANY),))
def gradient_of_another_micro_batch(step: Step) -> None:
    """a stage receives the gradients of the first two micro-batches in exchanged order."""
    _replace_receive(step, "backward", lambda own, sender, *args: own(_exchange_first_two(sender), *args))


@row("ours: a buffer for messages that is used again too early", runner=True, needs=_IN, sites=_READS)
def activation_of_the_micro_batch_before(step: Step) -> None:
    """from the second micro-batch on, a stage reads the previous micro-batch's activation."""
    last: list[Any] = []

    def receive(own: Any, *args: Any) -> Any:
        last.append(own(*args))
        # The first micro-batch has none before it, and reads its own activation.
        return last[max(len(last) - 2, 0)]

    _replace_receive(step, "forward", receive)


@row(OF_OTHERS, runner=True, needs=(PIPELINED, IN_V), sites=_READS)
def turn_passes_the_activation_before(step: Step) -> None:
    """at the turn of a V, the later stage reads the previous micro-batch's activation."""
    _replace_passed(step, "forward")


@row(OF_OTHERS, runner=True, needs=(PIPELINED, IN_V), kinds=("grad",), sites=(Site(ANY, "backward", None, ANY),))
def turn_passes_the_gradient_before(step: Step) -> None:
    """at the turn of a V, the earlier stage reads the previous micro-batch's gradient."""
    _replace_passed(step, "backward")


def _replace_passed(step: Step, half: str) -> None:
    own, last = step.passed, list[Any]()

    def passed(sender: Any) -> Any:
        if sender.half != half:
            return own(sender)
        last.append(own(sender))
        # The first micro-batch has none before it, and reads its own values.
        return last.pop(0) if len(last) > 1 else last[0]

    step.passed = passed


@row(OF_OTHERS, runner=True, needs=(MICRO_BATCHES,), kinds=("grad",), sites=(Site(ANY, "backward", None, ANY),))
def kept_values_of_the_micro_batch_before(step: Step) -> None:
    """a backward reads the values kept by the previous micro-batch's forward."""
    own, last = step.taken, dict[int, Any]()

    def taken(action: Any) -> Any:
        if action.half == "forward":
            return own(action)
        # The first backward of a stage has no predecessor: it gets its own values.
        # The right side is evaluated first, so `values` are those that the backward before this one took.
        values, last[action.stage] = last.get(action.stage), own(action)
        return values or last[action.stage]

    step.taken = taken


@row(OF_OTHERS, runner=True, needs=_IN, sites=(Site(ANY, "forward", None, "send"),))
def messages_out_of_order(step: Step) -> None:
    """a stage sends the second micro-batch's activation first."""
    own, held = step.send, list[Any]()

    def send(action: Any, index: int, value: Any) -> None:
        if action.half == "backward" or action.micro_batch > 1:
            own(action, index, value)
        elif action.micro_batch == 0:
            # The second value is sent in place of the first, and then the first in place of the second.
            held.append(value)
        else:
            own(_exchange_first_two(action), index, value)
            own(action, index, held.pop(0))

    step.send = send


@row("low-precision pipelines", runner=True, needs=_IN, sites=(Site(ANY, "forward", None, "_to_copy"),))
def activation_rounded_on_the_way(step: Step) -> None:
    """activations are rounded to 8 bits before they are sent."""
    _replace_sent(step, "forward", _in_eight_bits)


@row(
    "low-precision pipelines", runner=True, needs=_IN, kinds=("grad",), sites=(Site(ANY, "backward", None, "_to_copy"),)
)
def gradient_rounded_on_the_way(step: Step) -> None:
    """gradients of activations are rounded to 8 bits before they are sent."""
    _replace_sent(step, "backward", _in_eight_bits)


def _in_eight_bits(value: Any) -> Any:
    import torch

    return value.to(torch.float8_e5m2).to(value.dtype)


@row("ours: rows in another order", runner=True, needs=_IN, sites=(Site(ANY, "forward", None, "flip"),))
def rows_reversed_on_the_way(step: Step) -> None:
    """an activation's rows are sent in reverse order."""
    _replace_sent(step, "forward", lambda value: value.flip(0))


@row(
    "ours: a gradient that never arrives",
    runner=True,
    needs=_IN,
    kinds=("grad",),
    sites=(Site(ANY, "backward", None, "mul"),),
)
def gradient_that_is_not_sent(step: Step) -> None:
    """a stage sends zeros as its input's gradient."""
    _replace_sent(step, "backward", lambda value: value * 0)


@row(
    "ours: a mean that is taken twice",
    runner=True,
    needs=_IN,
    kinds=("grad",),
    sites=(Site(ANY, "backward", None, "div"),),
)
def gradient_halved_on_the_way(step: Step) -> None:
    """gradients of activations are halved between stages."""
    _replace_sent(step, "backward", lambda value: value / 2)


@row(OF_OTHERS, runner=True, needs=(MICRO_BATCHES,), sites=(Site("", "forward", None, "nll_loss_forward"),))
def labels_of_another_micro_batch(step: Step) -> None:
    """the losses of the first two micro-batches are computed with each other's labels."""
    _replace_input(step, -2)


@row(OF_OTHERS, runner=True, needs=(MICRO_BATCHES,), sites=(Site(ANY, "forward", None, "embedding"),))
def tokens_of_another_micro_batch(step: Step) -> None:
    """the first stage embeds the tokens of the first two micro-batches in exchanged order."""
    _replace_input(step, -3)


@row(SUMS, runner=True, needs=(MICRO_BATCHES,), kinds=("grad",), sites=_ADDS)
def gradients_added_from_the_last(step: Step) -> None:
    """gradients of micro-batches are added from the last to the first."""
    _added_at_the_end(step, lambda values: functools.reduce(lambda a, b: a + b, reversed(values)))


@row(SUMS, runner=True, needs=(MICRO_BATCHES,), kinds=("grad",), sites=_ADDS)
def gradients_added_in_pairs(step: Step) -> None:
    """gradients of micro-batches are added in pairs."""

    def in_pairs(values: list[Any]) -> Any:
        while len(values) > 1:
            # `sum` of a slice with one element, or of an empty one if the last has no partner.
            values = [sum(values[i + 1 : i + 2], values[i]) for i in range(0, len(values), 2)]
        return values[0]

    _added_at_the_end(step, in_pairs)


def _added_at_the_end(step: Step, total: Callable[[list[Any]], Any]) -> None:
    own = step.finish
    step.add = lambda found, gradient: [*(found if isinstance(found, list) else [found]), gradient]
    # A single micro-batch calls no `add`, so its gradient is no list.
    step.finish = lambda losses, found: own(
        losses, {name: total(x) if isinstance(x, list) else x for name, x in found.items()}
    )


@row(
    SUMS,
    runner=True,
    needs=(MICRO_BATCHES,),
    kinds=("loss", "grad"),
    sites=(*_ADDS, Site(ANY, "update", None, "add")),  # the second adds the losses
)
def micro_batches_from_the_last(step: Step) -> None:
    """every stage takes the micro-batches from the last to the first."""
    count = 1 + max(action.micro_batch for action in step.actions)
    # The order of forwards and backwards stays: only the numbers of the micro-batches change.
    step.actions = tuple(action._replace(micro_batch=count - 1 - action.micro_batch) for action in step.actions)


@row(
    "ours: sums in the dtype of parameters",
    runner=True,
    needs=(MICRO_BATCHES,),
    kinds=("grad",),
    sites=(Site(ANY, "backward", None, "_to_copy"),),
)
def gradients_added_in_bfloat16(step: Step) -> None:
    """gradients of micro-batches are added in bfloat16."""
    step.add = lambda total, gradient: (total.bfloat16() + gradient.bfloat16()).float()


def _is_last(step: Step) -> bool:
    return bool(step.running.micro_batch == max(action.micro_batch for action in step.actions))


@row(
    "DeepSpeed #7985's kind: the last micro-batch",
    runner=True,
    needs=(MICRO_BATCHES,),
    kinds=("grad",),
    sites=_ADDS_IN_PLACE,
)
def last_micro_batch_not_added(step: Step) -> None:
    """the last micro-batch's gradient is left out."""
    own = step.add
    step.add = lambda total, gradient: total if _is_last(step) else own(total, gradient)


@row("ours: one rank stops early", runner=True, needs=(MICRO_BATCHES,), kinds=("grad",), rank=-1, sites=_ADDS_IN_PLACE)
def last_micro_batch_not_added_on_one_rank(step: Step) -> None:
    """the last rank leaves the last micro-batch's gradient out."""
    own = step.add
    is_wrong = NOW.rank == NOW.world_size - 1
    step.add = lambda total, gradient: total if is_wrong and _is_last(step) else own(total, gradient)


@row("ours: a sum that begins with what it adds", runner=True, needs=(MICRO_BATCHES,), kinds=("grad",), sites=_ADDS)
def first_micro_batch_added_twice(step: Step) -> None:
    """the first micro-batch's gradient counts twice."""
    own = step.add
    # When the second micro-batch is added, the total is the first's gradient.
    step.add = lambda total, gradient: own(total + total if step.running.micro_batch == 1 else total, gradient)


@row(
    "ours: gradients that replace each other",
    runner=True,
    needs=(MICRO_BATCHES,),
    kinds=("grad",),
    sites=_ADDS_IN_PLACE,
)
def gradients_replace_each_other(step: Step) -> None:
    """each micro-batch's gradient replaces the previous gradient."""
    step.add = lambda total, gradient: gradient.clone()


@row(
    "torch.distributed.pipelining: scale_grads beside a mean",
    runner=True,
    needs=(MICRO_BATCHES,),
    kinds=("grad",),
    sites=(Site(ANY, "backward", None, "div"),),
)
def gradients_divided_once_more(step: Step) -> None:
    """gradients are divided by the number of micro-batches a second time."""
    own, count = step.finish, 1 + max(action.micro_batch for action in step.actions)
    step.finish = lambda losses, found: own(losses, {name: x / count for name, x in found.items()})


@row("ours: a loss that is overwritten", runner=True, needs=(MICRO_BATCHES,), kinds=("loss",))
def loss_of_the_last_micro_batch(step: Step) -> None:
    """the loss is that of the last micro-batch alone."""
    own = step.finish
    step.finish = lambda losses, found: own([x.clone() for x in losses[-1:]], found)


@row("ours: a sum where a mean is meant", runner=True, needs=(MICRO_BATCHES,), kinds=("loss",))
def losses_summed(step: Step) -> None:
    """the loss is the sum of the micro-batches' losses, not their mean."""
    own = step.finish
    # A list with a single loss: its mean is the sum.
    step.finish = lambda losses, found: own([sum(losses[1:], losses[0])] if losses else [], found)


def _sites_of_join(*operators: str) -> tuple[Site, ...]:
    return tuple(Site(ANY, ANY, None, name) for name in operators)


@row(
    "Megatron-LM's kind: tied embeddings without the all-reduce",
    runner=True,
    needs=_IN_BOTH,
    kinds=("grad",),
    sites=_sites_of_join("recv_", "add"),
)
def shared_gradients_not_joined(step: Step) -> None:
    """each stage updates a shared parameter with its own gradient alone."""
    # `dict` copies the gradients and exchanges nothing.
    step.join = dict


@row(
    "ours: one stage forgets",
    runner=True,
    needs=_IN_BOTH,
    kinds=("grad",),
    rank=0,
    sites=_sites_of_join("_fused_adamw_", "add"),
)
def shared_gradients_not_joined_on_one_rank(step: Step) -> None:
    """the first rank updates a shared parameter with its own gradient alone."""
    own, is_wrong = step.join, NOW.rank == 0

    def join(gradients: Any) -> Any:
        joined = own(gradients)
        # The wrong rank takes part in the exchange as well: others would wait for it.
        return dict(gradients) if is_wrong else joined

    step.join = join


@row(
    "ours: a sum that is taken again", runner=True, needs=_IN_BOTH, kinds=("grad",), sites=_sites_of_join("send", "add")
)
def shared_gradients_joined_twice(step: Step) -> None:
    """the sum of both stages' gradients of a shared parameter is exchanged and added a second time."""
    own = step.join
    step.join = lambda gradients: own(own(gradients))


@row("ours: one copy counts twice", runner=True, needs=_IN_BOTH, kinds=("grad",), sites=_sites_of_join("add"))
def own_shared_gradient_added_twice(step: Step) -> None:
    """each stage adds its own gradient of a shared parameter to the sum again."""
    own = step.join

    def join(gradients: Any) -> Any:
        joined = own(gradients)
        # `join` returns the gradient itself for a parameter that no other stage has.
        return {name: x if x is gradients[name] else x + gradients[name] for name, x in joined.items()}

    step.join = join


@row(
    "ours: a mean where a sum is meant",
    runner=True,
    needs=_IN_BOTH,
    kinds=("grad",),
    sites=_sites_of_join("div"),
)
def shared_gradients_averaged(step: Step) -> None:
    """both stages' gradients of a shared parameter are averaged instead of added."""
    own = step.join

    def join(gradients: Any) -> Any:
        joined = own(gradients)
        return {name: x if x is gradients[name] else x / 2 for name, x in joined.items()}

    step.join = join


@row(SUMS, runner=True, needs=_IN_BOTH, sees=(FLOAT32,), kinds=("grad",), sites=_sites_of_join("send", "add"))
def shared_gradients_joined_a_micro_batch(step: Step) -> None:
    """gradients of a shared parameter are added over stages for each micro-batch, and then over micro-batches."""
    own, finish, of = step.join, step.finish, dict[int, list[Any]]()
    # Gradients are only collected here: `join` adds them over stages first.
    step.add = lambda found, gradient: [*(found if isinstance(found, list) else [found]), gradient]

    def finished(losses: Any, found: Any) -> Any:
        totals = {name: sum(x[1:], x[0]) if isinstance(x, list) else x for name, x in found.items()}
        # `join` gets the totals, and finds the micro-batches' gradients of each by its identity.
        of.update({id(totals[name]): x for name, x in found.items() if isinstance(x, list)})
        return finish(losses, totals)

    def join(gradients: Any) -> Any:
        parts = {name: of[id(x)] for name, x in gradients.items()}
        count = len(next(iter(parts.values())))
        # Both stages exchange in the order of the micro-batches, so that each message finds its partner.
        each = [own({name: x[index] for name, x in parts.items()}) for index in range(count)]
        # `join` returns the gradient itself for a parameter that no other stage has.
        is_joined = {name for name in gradients if each[0][name] is not parts[name][0]}
        of.clear()
        return {**gradients, **{name: sum((x[name] for x in each[1:]), each[0][name]) for name in is_joined}}

    step.finish, step.join = finished, join


@row(
    "ours: gathered parameters that outlive the update",
    runner=True,
    needs=(MICRO_BATCHES, GATHERS_ONCE, steps(2)),
    sites=(Site(ANY, "forward", None, ANY),),
)
def gathered_before_the_update(step: Step) -> None:
    """from the second step on, a stage reads the parameters that it gathered in the first."""
    own, gathered = step.run_once, dict[int, Any]()

    def run_once(kind: str, action: Any, known: Any) -> Any:
        if kind != "gathers":
            return own(kind, action, known)
        found = own(kind, action, known)
        # Copies: a gather over a single rank may return its input.
        copies = {name: x.clone() if hasattr(x, "clone") else x for name, x in found.items()}
        return gathered.setdefault(action.stage, copies)

    step.run_once = run_once


@row(
    "torch's FSDP2: gradients of micro-batches are added in the dtype of parameters unless reduce_dtype says otherwise",
    runner=True,
    needs=(MICRO_BATCHES, REDUCTIONS_ONCE, BFLOAT16),
    kinds=("grad",),
    sites=(*_ADDS, Site(ANY, "backward", None, "reduce_scatter_tensor")),
)
def gradients_added_in_the_computes_dtype(step: Step) -> None:
    """gradients of micro-batches are added in bfloat16, before the reduction in float32."""
    import torch

    own = step.add

    def add(total: Any, gradient: Any) -> Any:
        return own(total.to(torch.bfloat16), gradient.to(torch.bfloat16)).to(total.dtype)

    step.add = add


@row(
    OF_OTHERS,
    runner=True,
    needs=(MICRO_BATCHES, DIVIDED),
    kinds=("grad",),
    sites=(Site(ANY, "backward", None, ANY),),
)
def weights_of_another_micro_batch(step: Step) -> None:
    """the gradients of weights read what the backward of the latest micro-batch left, not of their own."""
    own, latest = step.taken, dict[int, Any]()

    def taken(action: Any) -> Any:
        found = own(action)
        if action.part == "input":
            latest[action.stage] = found
        # What the first part itself computed is of the right micro-batch.
        return {**found, **latest[action.stage]} if action.part == "weights" else found

    step.taken = taken
