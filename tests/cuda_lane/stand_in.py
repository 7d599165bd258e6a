"""CUDA without a GPU, as far as tracing goes: fake tensors on cuda:0 to cuda:7, on a build of torch for CPUs or CUDA.

`load` comes before torch is imported, in a process of its own: what it loads cannot be taken back. It builds the
device guard with the C++ compiler at hand, in some seconds, and keeps it for the next time. Loads no torch itself.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from bitproof.harness.machine.compiler import compiler, compiler_problem

NUM_DEVICES = 8
_SOURCE = Path(__file__).with_name("device_guard.cpp")
_BUILD_SECONDS = 180


def why_not() -> str | None:
    """Why the stand-in cannot be had here, in words; None when it can."""
    if problem := compiler_problem():
        return f"the stand-in for CUDA needs a C++ compiler: {problem}"
    return None


def load() -> None:
    """Let this process's torch know of CUDA. Raises RuntimeError when torch is here already, or no compiler."""
    if "torch" in sys.modules:
        raise RuntimeError("the stand-in for CUDA comes before torch, which is imported already")
    if problem := why_not():
        raise RuntimeError(problem)
    library = build()
    folder = _torch_folder() / "lib"
    ctypes.CDLL(str(folder / "libtorch_cpu.so"), mode=ctypes.RTLD_GLOBAL)
    if (own := folder / "libtorch_cuda.so").exists():  # of two device guards the one that comes last counts
        ctypes.CDLL(str(own), mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def build() -> Path:
    """The guard's library for this torch and this source, made unless it is there. Raises RuntimeError."""
    folder = _torch_folder()
    key = hashlib.sha256(_SOURCE.read_bytes() + importlib.metadata.version("torch").encode() + str(folder).encode())
    kept = Path(tempfile.gettempdir(), f"bitproof-stand-in-{os.getuid()}")
    kept.mkdir(mode=0o700, exist_ok=True)
    if kept.stat().st_uid != os.getuid():
        raise RuntimeError(f"{kept} belongs to somebody else, and what lies in it would be loaded")
    library = kept / f"{key.hexdigest()[:16]}.so"
    if library.exists():
        return library
    unfinished = library.with_suffix(f".{os.getpid()}")
    include = folder / "include"
    command = [compiler(), "-shared", "-fPIC", "-std=c++20", "-O0", f"-I{include}"]
    command += [f"-I{include / 'torch' / 'csrc' / 'api' / 'include'}", str(_SOURCE), "-o", str(unfinished)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_BUILD_SECONDS, check=False)
    if done.returncode:
        raise RuntimeError(f"the stand-in for CUDA does not compile:\n{done.stderr}")
    unfinished.replace(library)
    return library


def _torch_folder() -> Path:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise RuntimeError("torch is not installed")
    return Path(spec.origin).parent
