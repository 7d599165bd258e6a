"""Fail unless a report shows the main cases EQUAL with all the evidence: three on 8 ranks over 20 steps, and three that
are made to see, on 6 ranks over 2 steps."""

import json
import sys
from pathlib import Path

NAMES = {"transformer_batch", "moe_batch", "moe_seq"}
SIGHT = {"blocks_batch_sight", "experts_batch_sight", "experts_seq_sight"}

report = json.loads(Path(sys.argv[1]).read_text())
cases = {case["name"]: case for case in report["cases"]}
assert report["exit_status"] == 0 and set(cases) == NAMES | SIGHT, (report["exit_status"], sorted(cases))
for name, case in cases.items():
    ranks, steps = (8, 20) if name in NAMES else (6, 2)
    losses = case["losses"]["reference"]
    values = [float.fromhex(loss) for loss in losses]
    assert case["verdict"] == "EQUAL", (name, case["verdict"], case["error"])
    assert (case["world_size"], case["steps"]) == (ranks, steps), name
    compared = case["compared"]
    assert compared["loss"] == ranks * steps and compared["grad"] > 20 * ranks * steps, (name, compared)
    assert not any(case["mismatched"].values()), (name, case["mismatched"])
    assert case["control"] == {"reference": "EQUAL", "candidate": "EQUAL"}, (name, case["control"])
    assert losses == case["losses"]["candidate"] and len(losses) == steps, name
    assert all(value == value and abs(value) < float("inf") for value in values), (name, values)
    if name in NAMES:
        assert sum(values[-5:]) < sum(values[:5]), (name, values)
    print(f"{name}: EQUAL, {sum(compared.values())} tensors compared, loss {values[0]:.3f} -> {values[-1]:.3f}")
