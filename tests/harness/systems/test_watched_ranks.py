"""What `watch` shows of trainers on two ranks, however their parameters lie there and whatever wraps them."""

from __future__ import annotations

import pytest

import bitproof
from tests.benchmarks import defective_trainers
from tests.benchmarks.defective_trainers import Model

pytestmark = [pytest.mark.ranks, pytest.mark.usefixtures("one_host")]
PARAMETERS = [name for name, _ in Model().named_parameters()]


@pytest.mark.parametrize("kind", ["clipping", "accumulating", "tp", "compiled", "loop", "pipelined"])
def test_gradients_parameters_and_states_have_the_bare_models_names_on_every_rank(kind, tmp_path):
    system = f"{defective_trainers.__file__}:{kind}"
    run = bitproof.run(reference=system, candidate=system, world_size=2, steps=2, control="never", report_dir=tmp_path)
    assert run.verdict == "EQUAL", run
    frame = run.frame()
    for kind_of, suffix in (("param", ""), ("grad", ""), ("optimizer", ".exp_avg_sq")):
        names = frame[(frame.kind == kind_of) & frame.name.str.endswith(suffix)]
        counts = names.groupby("name", sort=False).size()
        assert list(counts.index) == [f"{name}{suffix}" for name in PARAMETERS] and set(counts) == {4}
    losses = frame[frame.kind == "loss"]
    assert list(losses["rank"]) == ([1, 1] if kind == "pipelined" else [0, 0, 1, 1])
