"""Compile for GPUs what a GPU would run, on a machine without one: Inductor's and Triton's kernels, to machine code.

    python tests/cuda_lane/kernels.py [--capabilities 80,90,100] [--cases regional_inductor]

Every case of backend `inductor` or `regional_inductor`, with one layer and two ranks, is traced on fake CUDA tensors,
goes through every pass, and is compiled by the very backend. Triton, which brings an assembler, compiles each kernel
for each compute capability, and our own kernel that takes digests. Nothing is loaded or launched. A table tells the
kernels, their sizes, and the hash of what was generated, which must be one for two GPUs. Needs Triton (extra `kernel`),
a C++ compiler, and minutes. Ends with 1 when something does not compile, 3 when something that it needs is not there.

Each capability and GPU has a process of its own: torch and Triton remember for which they have compiled.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from bitproof.builtin_cases import CASES
from bitproof.harness.case import JOINT
from tests.cuda_lane import stand_in
from tests.figures import figure

ROOT = Path(__file__).parents[2]
DEVICES = (0, 7)
CAPABILITIES = "80,90,100"
COMPILED = tuple(name for name, case in CASES.items() if case.pipeline.compiles)
OWN = "digests (harness/capture/xxh3_kernel.py)"
SUMS = "sums in rank order (rank_order_kernel.py)"


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """What was compiled for one capability: kernels by name, the bytes of machine code of each, and a hash of it all.

    `variants` has how often each kernel was compiled: more than once would leave the choice to a clock.
    """

    generated_hash: str
    kernels: dict[str, int]
    variants: dict[str, int]
    nodes: int = 0


def main(arguments: list[str]) -> int:
    """Compile everything; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--capabilities", default=CAPABILITIES, help="80 is 8.0, that of an A100; 90 Hopper's, 100 Blackwell's"
    )
    parser.add_argument("--cases", default=",".join(COMPILED))
    parser.add_argument("--one", nargs=3, metavar=("CASE", "CAPABILITY", "DEVICE"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.one:
        name, capability, device = options.one
        print(json.dumps(asdict(compile_one(name, int(capability), int(device)))))
        return 0
    problem = stand_in.why_not()
    if importlib.util.find_spec("triton") is None:
        problem = "Triton is not installed: pip install -c constraints.txt 'bitproof[kernel]'"
    if problem:
        print(problem, file=sys.stderr)
        return 3
    stand_in.build()
    failed = passed = 0
    for name in (OWN, SUMS, *filter(None, options.cases.split(","))):
        for capability in options.capabilities.split(","):
            found = [
                _in_a_process(name, capability, str(device))
                for device in (DEVICES if name not in (OWN, SUMS) else DEVICES[:1])
            ]
            problems = [problem for problem in found if isinstance(problem, str)] or _problems(found)
            failed += bool(problems)
            passed += not problems
            first = found[0]
            text = "; ".join(problems) if problems else _describe(first)  # type: ignore[arg-type]
            print(f"{'FAIL' if problems else 'pass'}  sm_{capability:<4} {name:<42} {text}", flush=True)
    missed = 0 if options.capabilities != CAPABILITIES else figure("cuda-kernels", passed)
    return int(bool(failed or missed))


def _problems(found: list[Any]) -> list[str]:
    problems = []
    if len({one.generated_hash for one in found}) > 1:
        problems.append("what is generated depends on the device's index")
    if several := [name for name, count in found[0].variants.items() if count > 1]:
        problems.append(f"a clock would choose among variants of {', '.join(several)}")
    if not found[0].kernels:
        problems.append("there is no kernel")
    return problems


def _describe(one: Compiled) -> str:
    size = sum(one.kernels.values())
    return f"{len(one.kernels)} kernels, {size:,} bytes of machine code, generated {one.generated_hash[:12]}"


def _in_a_process(*arguments: str) -> Compiled | str:
    command = [sys.executable, __file__, "--one", *arguments]
    with tempfile.TemporaryDirectory(prefix="bitproof-kernels-") as folder:
        environment = os.environ | {"TMPDIR": folder, "TRITON_CACHE_DIR": f"{folder}/triton"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        return (done.stderr.strip().splitlines() or ["it says nothing"])[-1]
    return Compiled(**json.loads(done.stdout.splitlines()[-1]))


def compile_one(name: str, capability: int, device: int) -> Compiled:
    """In a process of its own: compile our kernel, or a case's graph, for a GPU of this capability and index."""
    if name == OWN:
        return _compile_own(capability)
    if name == SUMS:
        return _compile_sums(capability)
    stand_in.load()
    from tests.cuda_lane import operators

    operators.install()
    pretend(capability)
    from bitproof.harness.execute.host.programs import prepare_program
    from bitproof.harness.graph.graph_options import GraphOptions
    from bitproof.harness.machine.determinism import set_determinism
    from tests.small import small

    case = small(CASES[name])
    case = replace(case, parallelism=replace(case.parallelism, world_size=2), steps=1)
    set_determinism(case.seed)
    with operators.current_device(device) as cuda:
        program = prepare_program(case, cuda, GraphOptions(), system=case.candidate)
    run: Any = program.run
    folders = [half.folder for half in ([run.forward, run.backward] if case.candidate == JOINT else [run])]
    binaries = [file for folder in folders for file in folder.rglob("*.cubin")]
    return Compiled(
        generated_hash=program.generated_hash,
        kernels={file.stem: file.stat().st_size for file in binaries},
        variants=dict(Counter(file.stem for file in binaries)),  # asdict makes a Counter of a Counter's pairs
        nodes=len(program.module.graph.nodes),
    )


def _compile_own(capability: int) -> Compiled:
    import hashlib

    import triton
    from triton.backends.compiler import GPUTarget

    from bitproof.harness.capture.xxh3_kernel import hash_leaf

    signature = dict.fromkeys(["words", "table", "digests"], "*i64")
    aligned = {(argument,): [["tt.divisibility", 16]] for argument in range(3)}
    source = triton.compiler.ASTSource(fn=hash_leaf, signature=signature, constexprs={}, attrs=aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 1})
    return Compiled(
        generated_hash=hashlib.sha256(compiled.asm["ttir"].encode()).hexdigest(),
        kernels={"hash_leaf": len(compiled.asm["cubin"])},
        variants={"hash_leaf": 1},
    )


def _compile_sums(capability: int) -> Compiled:
    import hashlib

    kernels = _kernels_of_sums(capability)
    return Compiled(
        generated_hash=hashlib.sha256("".join(x.asm["ttir"] for x in kernels.values()).encode()).hexdigest(),
        kernels={name: len(x.asm["cubin"]) for name, x in kernels.items()},
        variants=dict.fromkeys(kernels, 1),
    )


def compile_sums(capability: int) -> dict[str, tuple[int, str]]:
    """Of the kernel that adds in rank order, by element type: the bytes of shared memory, and its assembly."""
    return {name: (x.metadata.shared, x.asm["ptx"]) for name, x in _kernels_of_sums(capability).items()}


def _kernels_of_sums(capability: int) -> dict[str, Any]:
    import triton
    from triton.backends.compiler import GPUTarget

    from bitproof.reference.parallel.rank_order_kernel import BLOCK, add_in_rank_order

    found = {}
    sizes = {"stride": "i64", "num_elements": "i64", "num_ranks": "i32", "block": "constexpr", "kind": "constexpr"}
    for name, kind in (("fp32", 0), ("fp64", 0), ("fp16", 1), ("i16", 2)):
        signature = {"parts": f"*{name}", "total": f"*{name}"} | sizes
        aligned = {(argument,): [["tt.divisibility", 16]] for argument in range(2)}
        constants = {"block": BLOCK, "kind": kind}
        source = triton.compiler.ASTSource(add_in_rank_order, signature=signature, constexprs=constants, attrs=aligned)
        found[name] = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    return found


def pretend(capability: int) -> None:
    """Let Inductor and Triton find a GPU of this capability, for which they compile and on which they run nothing."""
    import torch
    import triton
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen
    from torch._inductor.runtime import triton_helpers
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner
    from triton.backends.compiler import GPUTarget

    major, minor = divmod(capability, 10)
    properties = SimpleNamespace(
        name="stand-in",
        type="cuda",
        index=0,
        major=major,
        minor=minor,
        gcnArchName="",
        multi_processor_count=132,
        warp_size=32,
        total_memory=80 * 2**30,
        L2_cache_size=50 * 2**20,
        max_threads_per_block=1024,
        max_threads_per_multi_processor=2048,
        regs_per_multiprocessor=65536,
        shared_memory_per_block=48 * 2**10,
        shared_memory_per_block_optin=163 * 2**10 if capability < 90 else 227 * 2**10,
    )

    class Driver:
        """What Triton asks of a GPU's driver before it compiles."""

        def get_current_target(self) -> Any:
            return GPUTarget("cuda", capability, 32)

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: Any = None) -> int:
            return 0

        def get_active_torch_device(self) -> Any:
            return torch.device("cuda", 0)

        def get_device_interface(self) -> Any:
            return torch.cuda

    triton.runtime.driver.set_active(Driver())
    for interface, name in ((torch.cuda, "get_device_properties"), (CudaInterface, "get_device_properties")):
        setattr(interface, name, staticmethod(lambda device=None: properties))
    CudaInterface.Worker.get_device_properties = staticmethod(lambda device=None: properties)
    torch.cuda.get_device_capability = lambda device=None: (major, minor)
    torch.cuda.is_bf16_supported = lambda including_emulation=True: True
    CudaInterface.get_compute_capability = staticmethod(lambda device=None: capability)
    CudaInterface.is_bf16_supported = staticmethod(lambda including_emulation=False: True)
    CudaInterface.is_available = staticmethod(lambda: True)
    torch._C._cuda_getCurrentRawStream = lambda device: 0
    triton_helpers.set_driver_to_gpu = lambda: None
    # What would launch kernels: to choose among variants of one by a clock, and to run them.
    PythonWrapperCodegen.generate_and_run_autotune_block = lambda self: None
    CachingAutotuner._make_launchers = lambda self: None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
