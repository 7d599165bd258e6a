"""Faults in the call of fused AdamW, in every system that uses it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bitproof.harness.disturb.entry import row, steps

if TYPE_CHECKING:
    from collections.abc import Callable

    from bitproof.harness.disturb.entry import Entry, Need, TamperCall
    from bitproof.harness.disturb.tamper import TamperedCall

OPERATOR = "_fused_adamw_"
PARAMETERS, GRADIENTS, FIRST, SECOND, STEPS = "self", "grads", "exp_avgs", "exp_avg_sqs", "state_steps"
LISTS = (PARAMETERS, GRADIENTS, FIRST, SECOND, STEPS)


def _update(source: str, needs: tuple[Need, ...] = (), rank: int | None = None) -> Callable[[TamperCall], Entry]:
    return row(source, operators=(OPERATOR,), needs=needs, kinds=("param", "optimizer"), rank=rank)


def _without_last(call: TamperedCall) -> Any:
    return call.with_(**{name: call.given(name)[:-1] for name in LISTS})


@_update("ours")
def no_weight_decay(call: TamperedCall) -> Any:
    """weight decay is left out."""
    return call.with_(weight_decay=0.0)


@_update("ours: in the loss and in the update")
def decayed_twice(call: TamperedCall) -> Any:
    """weight decay is applied twice."""
    return call.with_(weight_decay=2 * call.given("weight_decay"))


@_update("Loshchilov and Hutter, arXiv:1711.05101: Adam with L2 is not AdamW")
def decay_in_the_gradient(call: TamperedCall) -> Any:
    """weight decay is added to the gradient and so enters the moments."""
    decay = call.given("weight_decay")
    pairs = zip(call.given(GRADIENTS), call.given(PARAMETERS), strict=True)
    # The decoupled decay is turned off, since the gradient has it now.
    return call.with_(weight_decay=0.0, grads=[gradient + decay * parameter for gradient, parameter in pairs])


@_update("ours")
def betas_exchanged(call: TamperedCall) -> Any:
    """the two betas are exchanged."""
    return call.with_(beta1=call.given("beta2"), beta2=call.given("beta1"))


@_update("ours: another library's default")
def other_epsilon_in_adam(call: TamperedCall) -> Any:
    """AdamW's epsilon is 1e-6."""
    return call.with_(eps=1e-6)


@_update("Megatron-LM #7177: a learning rate that a restart does not restore", needs=(steps(2),))
def schedule_off_by_one(call: TamperedCall) -> Any:
    """from the second step on, the learning rate is halved."""
    return call.with_(lr=call.given("lr") / 2) if call.clock.step >= 1 else call.run()


@_update("ours: maximize")
def ascends(call: TamperedCall) -> Any:
    """parameters move up the gradient instead of down."""
    return call.with_(maximize=True)


@_update("TrainCheck's kind: parameters that an optimizer was not given")
def a_parameter_skipped(call: TamperedCall) -> Any:
    """the last parameter is never updated."""
    return _without_last(call)


@_update("TTrace's kind: ranks whose updates part", rank=-1)
def a_parameter_skipped_on_one_rank(call: TamperedCall) -> Any:
    """the last parameter is not updated on the last rank."""
    return _without_last(call) if call.clock.is_last_rank else call.run()


@_update("ours")
def bias_correction_off_by_one(call: TamperedCall) -> Any:
    """bias correction uses a step count that is too large by 1."""
    # New tensors, so the optimizer's own step counts stay right.
    return call.with_(state_steps=[step + 1 for step in call.given(STEPS)])


@_update("ours: a step count that is not advanced", needs=(steps(2),))
def bias_correction_of_the_first_step(call: TamperedCall) -> Any:
    """bias correction uses the step count of the first step at every step."""
    return call.with_(state_steps=[step * 0 + 1 for step in call.given(STEPS)]) if call.clock.step else call.run()


@_update("ours: state in the dtype of compute")
def moments_in_bfloat16(call: TamperedCall) -> Any:
    """first moments are stored in bfloat16."""
    call.fire()
    result = call.run()
    # After the update, so that the next step reads rounded moments.
    for moment in call.given(FIRST):
        moment.copy_(moment.bfloat16())
    return result


@_update("ours: two hooks that step")
def updated_twice(call: TamperedCall) -> Any:
    """every parameter is updated twice."""
    call.fire()
    call.run()
    return call.run()


@_update("trl #2175: gradients kept in 16 bits")
def gradients_rounded_for_the_update(call: TamperedCall) -> Any:
    """the update reads gradients rounded to bfloat16."""
    return call.with_(grads=[gradient.bfloat16().float() for gradient in call.given(GRADIENTS)])


@_update("DeepSpeed #7837: a loss scale where none belongs; an overflow that is none", needs=(steps(2),))
def an_update_skipped(call: TamperedCall) -> Any:
    """the second step's update is skipped."""
    if call.clock.step != 1:
        return call.run()
    call.fire()
    # Operators that update lists in place return nothing.
    return None


@_update("ours: state by position, not by name", needs=(steps(2),))
def second_moments_exchanged(call: TamperedCall) -> Any:
    """two parameters of the same shape have each other's second moment."""
    # A copy, since the call's own list must stay in its order.
    second = list(call.given(SECOND))
    shapes = [tuple(x.shape) for x in second]
    for i, shape in enumerate(shapes):
        # The first two of the same shape.
        if shape in shapes[i + 1 :]:
            j = shapes.index(shape, i + 1)
            second[i], second[j] = second[j], second[i]
            return call.with_(exp_avg_sqs=second)
    return call.run()
