"""Fail unless a report shows the three cases EQUAL on 8 ranks over 20 steps, with all the evidence."""

import json
import sys
from pathlib import Path

NAMES = {"transformer_batch", "moe_batch", "moe_seq"}

report = json.loads(Path(sys.argv[1]).read_text())
cases = {case["name"]: case for case in report["cases"]}
assert report["exit_status"] == 0 and set(cases) == NAMES, (report["exit_status"], sorted(cases))
for name, case in cases.items():
    losses = case["losses"]["reference"]
    values = [float.fromhex(loss) for loss in losses]
    assert case["verdict"] == "EQUAL", (name, case["verdict"], case["error"])
    assert (case["world_size"], case["steps"]) == (8, 20), name
    assert case["compared"]["loss"] == 160 and case["compared"]["grad"] > 1000, (name, case["compared"])
    assert not any(case["mismatched"].values()), (name, case["mismatched"])
    assert case["control"] == {"reference": "EQUAL", "candidate": "EQUAL"}, (name, case["control"])
    assert losses == case["losses"]["candidate"] and len(losses) == 20, name
    assert all(value == value and abs(value) < float("inf") for value in values), (name, values)
    assert sum(values[-5:]) < sum(values[:5]), (name, values)
    print(f"{name}: EQUAL, {sum(case['compared'].values())} tensors compared, loss {values[0]:.3f} -> {values[-1]:.3f}")
