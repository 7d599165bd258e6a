"""How calls over lists of tensors are told apart by index."""

from __future__ import annotations

import torch

from bitproof.harness.localize.logs.foreach_calls import lane, num_lanes

aten = torch.ops.aten


def tensors(n: int) -> list[torch.Tensor]:
    return [torch.full((2,), float(i)) for i in range(n)]


def test_a_foreach_call_has_as_many_lanes_as_its_lists_are_long() -> None:
    assert num_lanes(aten._foreach_mul_.Scalar, (tensors(3), 0.5), {}) == 3
    assert num_lanes(aten._foreach_add.List, (tensors(2), tensors(2)), {}) == 2


def test_a_fused_optimizer_has_a_lane_for_each_parameter_though_a_list_is_empty() -> None:
    arguments = (*(tensors(2) for _ in range(4)), [], tensors(2))
    assert num_lanes(aten._fused_adamw_.default, arguments, {"lr": 0.1}) == 2


def test_a_call_of_another_name_that_takes_a_list_is_one() -> None:
    assert num_lanes(aten.cat.default, (tensors(3),), {}) == 0


def test_a_call_that_writes_one_tensor_for_all_indices_is_one() -> None:
    arguments = (tensors(2), torch.zeros(1), torch.ones(1))
    assert num_lanes(aten._amp_foreach_non_finite_check_and_unscale_.default, arguments, {}) == 0


def test_a_lane_has_its_entry_of_each_list_and_all_that_is_not_a_list_of_tensors() -> None:
    first, second, shared = tensors(2), tensors(2), torch.ones(1)
    found = lane([first, second, shared, [1.0, 2.0], None], 1, 2)
    assert found[0] is first[1] and found[1] is second[1] and found[2] is shared
    assert found[3:] == [[1.0, 2.0], None]
