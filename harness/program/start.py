"""The first lines of a process of ours, as a file: `harness` is the package that this file lies in.

    python -P .../program/start.py MODULE ...    runs MODULE's `main`, as `python -m MODULE ...` would

`-m` would put the working directory first, where a user may have a `harness/` of their own. And without `-P` Python
would put this file's folder first, where `select.py` hides the standard library's.
"""

import gc
import importlib
import os
import sys
from pathlib import Path

# Nothing else is looked for at our root, which may be site-packages: `harness` itself imports nothing.
sys.path.insert(0, str(Path(__file__).parents[2]))
import harness  # noqa: F401

del sys.path[0]
from harness.program import sources  # noqa: E402
from harness.program.own_packages import claim  # noqa: E402

claim()  # here, so that processes which `multiprocessing` spawns from ours do it too

if __name__ == "__main__":
    gc.disable()  # until the module enables it: what it imports is no garbage, and looking takes a sixth of the time
    if not os.environ.get("PYTHONSAFEPATH"):
        sys.path.insert(0, os.getcwd())  # a user's modules, as for `python -m`
    sources.note()
    importlib.import_module(sys.argv.pop(1)).main()
