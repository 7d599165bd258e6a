"""What goes wrong in the update: in the one call that makes it, on every system that makes it with fused AdamW."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bitproof.harness.disturb.faults.entry import Entry, Family, Site, steps

if TYPE_CHECKING:
    from collections.abc import Callable

    from bitproof.harness.disturb.faults.tamper import TamperedCall

FAMILY: Family = "optimizer"

OPERATOR = "_fused_adamw_"
SITES = (Site(None, "update", None, OPERATOR),)
PARAMETERS, GRADIENTS, FIRST, SECOND, STEPS = "self", "grads", "exp_avgs", "exp_avg_sqs", "state_steps"
LISTS = (PARAMETERS, GRADIENTS, FIRST, SECOND, STEPS)


def _with(**changes: Callable[[Any], Any]) -> Callable[[TamperedCall], Any]:
    """A call in which some arguments are what functions make of them."""

    def tamper(call: TamperedCall) -> Any:
        return call.with_(**{name: change(call.given(name)) for name, change in changes.items()})

    return tamper


def _exchanged_betas(call: TamperedCall) -> Any:
    return call.with_(beta1=call.given("beta2"), beta2=call.given("beta1"))


def _late_schedule(call: TamperedCall) -> Any:
    return call.with_(lr=call.given("lr") / 2) if call.clock.step >= 1 else call.run()


def _without_last(call: TamperedCall) -> Any:
    return call.with_(**{name: call.given(name)[:-1] for name in LISTS})


def _without_last_on_one_rank(call: TamperedCall) -> Any:
    return _without_last(call) if call.clock.is_last_rank else call.run()


def _steps_off_by_one(call: TamperedCall) -> Any:
    return call.with_(state_steps=[step + 1 for step in call.given(STEPS)])


def _steps_forgotten(call: TamperedCall) -> Any:
    return call.with_(state_steps=[step * 0 + 1 for step in call.given(STEPS)]) if call.clock.step else call.run()


def _moments_in_bfloat16(call: TamperedCall) -> Any:
    call.fire()
    result = call.run()
    for moment in call.given(FIRST):
        moment.copy_(moment.bfloat16())
    return result


def _twice(call: TamperedCall) -> Any:
    call.fire()
    call.run()
    return call.run()


def _coupled_decay(call: TamperedCall) -> Any:
    decay = call.given("weight_decay")
    pairs = zip(call.given(GRADIENTS), call.given(PARAMETERS), strict=True)
    return call.with_(weight_decay=0.0, grads=[gradient + decay * parameter for gradient, parameter in pairs])


def _skipped_once(call: TamperedCall) -> Any:
    if call.clock.step != 1:
        return call.run()
    call.fire()
    return None


def _shared_second_moment(call: TamperedCall) -> Any:
    """The first two parameters of one shape get each other's second moment."""
    second = list(call.given(SECOND))
    shapes = [tuple(x.shape) for x in second]
    for i, shape in enumerate(shapes):
        if shape in shapes[i + 1 :]:
            j = shapes.index(shape, i + 1)
            second[i], second[j] = second[j], second[i]
            return call.with_(exp_avg_sqs=second)
    return call.run()


def _row(name: str, says: str, source: str, call: Callable[[TamperedCall], Any], **more: Any) -> Entry:
    return Entry(
        name=name,
        says=says,
        source=source,
        call=call,
        operators=(OPERATOR,),
        sites=SITES,
        kinds=("param", "optimizer"),
        **more,
    )


ENTRIES = (
    _row("no-weight-decay", "weights do not decay", "ours", _with(weight_decay=lambda decay: 0.0)),
    _row(
        "decayed-twice",
        "weight decay counts twice",
        "ours: in the loss and in the update",
        _with(weight_decay=lambda decay: 2 * decay),
    ),
    _row(
        "decay-in-the-gradient",
        "weight decay goes through the moments",
        "Loshchilov and Hutter, arXiv:1711.05101: Adam with L2 is not AdamW",
        _coupled_decay,
    ),
    _row("betas-exchanged", "the two betas are exchanged", "ours", _exchanged_betas),
    _row("other-epsilon-in-adam", "epsilon is 1e-6", "ours: another library's default", _with(eps=lambda eps: 1e-6)),
    _row(
        "schedule-off-by-one",
        "from the second step on the learning rate is half of what it should be",
        "Megatron-LM #7177: a learning rate that a restart does not restore",
        _late_schedule,
        needs=(steps(2),),
    ),
    _row("ascends", "parameters climb", "ours: maximize", _with(maximize=lambda maximize: True)),
    _row(
        "a-parameter-skipped",
        "the last parameter is never updated",
        "TrainCheck's kind: parameters that an optimizer was not given",
        _without_last,
    ),
    _row(
        "a-parameter-skipped-on-one-rank",
        "the last parameter is not updated on the last rank",
        "TTrace's kind: ranks whose updates part",
        _without_last_on_one_rank,
        rank=-1,
    ),
    _row("bias-correction-off-by-one", "moments are corrected for one step more", "ours", _steps_off_by_one),
    _row(
        "bias-correction-of-the-first-step",
        "moments are always corrected as at the first step",
        "ours: a step count that is not advanced",
        _steps_forgotten,
        needs=(steps(2),),
    ),
    _row(
        "moments-in-bfloat16",
        "first moments are stored in bfloat16",
        "ours: state in the dtype of compute",
        _moments_in_bfloat16,
    ),
    _row("updated-twice", "every parameter is updated twice", "ours: two hooks that step", _twice),
    _row(
        "gradients-rounded-for-the-update",
        "the update reads gradients in bfloat16",
        "trl #2175: gradients kept in 16 bits",
        _with(grads=lambda grads: [gradient.bfloat16().float() for gradient in grads]),
    ),
    _row(
        "an-update-skipped",
        "the second step updates nothing",
        "DeepSpeed #7837: a loss scale where none belongs; an overflow that is none",
        _skipped_once,
        needs=(steps(2),),
    ),
    _row(
        "second-moments-exchanged",
        "two parameters of one shape have each other's second moment",
        "ours: state by position, not by name",
        _shared_second_moment,
        needs=(steps(2),),
    ),
)
