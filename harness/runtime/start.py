"""The first lines of a process of ours, as a file: `bitproof` is the package that this file lies in.

    python -P .../runtime/start.py MODULE ...    runs MODULE's `main`, as `python -m MODULE ...` would

`-m` would put the working directory first, where another checkout of bitproof may lie. And without `-P` Python
would put this file's folder first, where `select.py` hides the standard library's.
"""

import gc
import importlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType


def _run_text(name: str) -> ModuleType:
    """Make a module of a file beside this one, by its text: it is what decides how all others are loaded."""
    file = Path(__file__).with_name(f"{name}.py")
    spec = importlib.util.spec_from_file_location(f"bitproof.harness.runtime.{name}", file)
    assert spec is not None, "it is Python"
    if spec.name not in sys.modules:
        sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
        exec(compile(file.read_bytes(), str(file), "exec", dont_inherit=True), module.__dict__)
    return sys.modules[spec.name]


_run_text("text_loader").claim()  # here, so that processes which `multiprocessing` spawns from ours do it too

# Nothing else is looked for at our root, which may be site-packages: `bitproof.harness` imports nothing.
sys.path.insert(0, str(Path(__file__).parents[3]))
import bitproof.harness  # noqa: E402, F401

del sys.path[0]

if __name__ == "__main__":
    gc.disable()  # until the module enables it: what it imports is no garbage, and looking takes a sixth of the time
    if not os.environ.get("PYTHONSAFEPATH"):
        sys.path.insert(0, os.getcwd())  # a user's modules, as for `python -m`
    from bitproof.harness.runtime import sources

    sources.note()
    importlib.import_module(sys.argv.pop(1)).main()
