from harness.certificate.assumptions import ASSUMPTIONS, assumed
from harness.certificate.data import Call, Graph

ALWAYS = tuple(text for name, text in ASSUMPTIONS if not name)
COLLECTIVES, BUCKETS, GROUPED = (text for name, text in ASSUMPTIONS if name)


def graph(*ops):
    return Graph(tuple(Call(op, op, (), None) for op in ops), ())


def test_what_is_assumed_is_what_the_graphs_and_rules_need():
    plain = graph("input", "aten.mm.default", "view")
    assert assumed((plain, plain), {"view_of_view"}) == ALWAYS
    assert assumed((plain, graph("_c10d_functional.wait_tensor.default")), ()) == (*ALWAYS, COLLECTIVES)
    assert assumed((graph("aten._grouped_mm.default"), plain), {"reduce_of_cat"}) == (*ALWAYS, BUCKETS, GROUPED)
