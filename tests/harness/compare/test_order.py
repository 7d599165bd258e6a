from bitproof.harness.compare.order import ComputationOrder, computation_order, place_of
from bitproof.harness.records import Key


def test_within_a_step_records_come_in_the_order_of_its_phases():
    phases = [
        ("buffer", "w@before_forward"),
        ("loss", "loss"),
        ("grad", "w"),
        ("grad_norm", "total"),
        ("buffer", "bias@before_optimizer"),
        ("param", "w"),
        ("optimizer", "w.exp_avg"),
        ("buffer", "bias@after_optimizer"),
    ]
    keys = [Key(0, kind, name, 0) for kind, name in phases]
    backwards = list(reversed(keys))
    assert sorted(backwards, key=computation_order(backwards)) == keys


def test_names_of_one_phase_come_as_they_were_first_recorded_and_ranks_last():
    keys = [Key(0, "grad", name, rank) for name in ("b", "a") for rank in (0, 1)]
    assert sorted(sorted(keys), key=computation_order(keys)) == keys


def test_what_ranks_recorded_later_changes_no_earlier_place():
    order = ComputationOrder()
    order.add([Key(0, "grad", "b", 0)])
    place = order(Key(3, "grad", "b", 1))
    order.add([Key(0, "grad", "a", 1), Key(0, "grad", "b", 1)])
    assert order(Key(3, "grad", "b", 1)) == place < order(Key(3, "grad", "a", 0))


def test_a_record_is_of_a_module_and_a_direction():
    places = {
        ("activation", "layers.0.mlp@forward"): ("layers.0.mlp", "forward"),
        ("activation", "layers.0.mlp@backward.output1"): ("layers.0.mlp", "backward"),
        ("loss", "loss"): ("", "forward"),
        ("grad", "layers.0.norm.weight"): ("layers.0.norm", "backward"),
        ("grad", "scale"): ("", "backward"),
        ("param", "layers.0.norm.weight"): ("layers.0.norm", "update"),
        ("optimizer", "layers.0.norm.weight.exp_avg"): ("layers.0.norm", "update"),
        ("buffer", "data@after_optimizer"): ("", "forward"),
    }
    assert {key: place_of(Key(0, *key, 0)) for key in places} == places
