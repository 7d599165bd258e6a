"""The file with which Python starts bitproof's own processes.

    python -P .../runtime/start.py MODULE ...    runs MODULE's `main`, as `python -m MODULE ...` would

The process uses the package `bitproof` that contains this file. With `-m`, another checkout in the working directory
would be found first. Without `-P`, Python would find this folder's modules before others of the same name.
"""

import gc
import importlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType


def _run_text(name: str) -> ModuleType:
    file = Path(__file__).with_name(f"{name}.py")
    spec = importlib.util.spec_from_file_location(f"bitproof.harness.runtime.{name}", file)
    assert spec is not None, "it is Python"
    # The import hook cannot load itself, so its text is compiled here.
    if spec.name not in sys.modules:
        sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
        exec(compile(file.read_bytes(), str(file), "exec", dont_inherit=True), module.__dict__)
    return sys.modules[spec.name]


_run_text("text_loader").claim()  # here, so that processes which `multiprocessing` spawns from ours do it too

# Our root may be site-packages, so nothing else is imported from it: `bitproof.harness` imports nothing.
sys.path.insert(0, str(Path(__file__).parents[3]))
import bitproof.harness  # noqa: E402, F401

del sys.path[0]

if __name__ == "__main__":
    gc.disable()  # until the module enables it: imports create no garbage, and collecting takes a sixth of the time
    if not os.environ.get("PYTHONSAFEPATH"):
        sys.path.insert(0, os.getcwd())  # for a user's modules, as with `python -m`
    from bitproof.harness.runtime import sources

    sources.note()
    importlib.import_module(sys.argv.pop(1)).main()
