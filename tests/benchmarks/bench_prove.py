"""What a proof costs over a model's depth: `python tests/benchmarks/bench_prove.py [FLAVOR] [LAYERS ...]`.

By default the 671B configuration of DeepSeek-V3, moe_seq, 8 ranks with ep 8, sequences of 4,096 tokens, 4 and 8 layers
(3 of them dense): its tensors are fake, so nothing is computed. Told are seconds to trace each side, to write both down
as data, to compare, to write and to check the certificate; its bytes; and the memory that was needed.
"""

from __future__ import annotations

import resource
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from cases import CASES
from harness.case import Batch, Case, Parallelism
from harness.certificate.check import check
from harness.certificate.files import read_certificate, write_certificate
from harness.prove.certify import certificate_of
from harness.prove.prove import prove_case

LAYERS = (4, 8)


def case_of(flavor: str, layers: int) -> Case:
    """moe_seq in another size."""
    case = CASES["moe_seq"]
    return replace(
        case,
        model=replace(case.model, flavor=flavor, layers=layers),
        parallelism=Parallelism(world_size=8, ep=8),
        batch=Batch(sequences=4, seq_len=4096),
    )


def main(flavor: str, depths: list[int]) -> int:
    """Prove each, print a line, and return 1 where an output is not proved."""
    missing = 0
    for layers in depths:
        found = prove_case(case_of(flavor, layers), evaluate=False)
        assert found.proof is not None and found.graphs is not None, found.reason
        start = time.perf_counter()
        certificate = certificate_of("moe_seq", found.proof)
        with tempfile.TemporaryDirectory() as folder:
            write_certificate(certificate, Path(folder))
            size = sum(file.stat().st_size for file in Path(folder).iterdir())
            written = time.perf_counter()
            check(read_certificate(Path(folder)))
        checked = time.perf_counter()
        calls = sum(len(graph.calls) for graph in found.graphs)
        proved, missing = found.proof.count("PROVED"), missing + (found.verdict != "PROVED")
        seconds = ", ".join(f"{name} {value:.1f} s" for name, value in found.seconds)
        compare = dict(found.seconds)["compare"]
        print(
            f"{flavor}, {layers} layers: {proved} of {len(found.proof.answers)} PROVED; {calls} calls; {seconds} "
            f"({1e6 * compare / calls:.0f} us a call); certificate written in {written - start:.1f} s, "
            f"{size / 1e6:.1f} MB, checked in {checked - written:.1f} s; "
            f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.1f} GB",
            flush=True,
        )
    return int(missing > 0)


if __name__ == "__main__":
    flavor, *depths = sys.argv[1:] or ["671B"]
    sys.exit(main(flavor, [int(text) for text in depths] or list(LAYERS)))
