"""Answers a request: `python answer_request.py WHAT REQUEST.json ANSWER.json`, with any Python that has torch.

The request is a JSON object with the arguments of WHAT, such as "replay". An answer with the key "error" means that the
request failed.
"""

from __future__ import annotations

import importlib.util
import json
import os
import resource
import sys
from typing import Any

NAME = "bitproof_moved"


def load(module: str) -> Any:
    """Import a module of this folder by name, even if bitproof is not installed."""
    here = os.path.dirname(os.path.abspath(__file__))
    if NAME not in sys.modules:
        # A package of its own name, made from this folder: relative imports work in it, and an installed bitproof
        # plays no part.
        spec = importlib.util.spec_from_file_location(
            NAME, os.path.join(here, "__init__.py"), submodule_search_locations=[here]
        )
        assert spec is not None and spec.loader is not None
        package = sys.modules[NAME] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(package)
    return importlib.import_module(f"{NAME}.{module}")


def answer(what: str, asked: dict[str, Any]) -> Any:
    """Return the answer to a request, as values for JSON. `asked` has the arguments of `what` by name:

    - "record": run a program, and record its calls into an archive.
    - "merge": merge the archives of all ranks.
    - "results": run the program again, and store results of some calls.
    - "exchange": run the program, and let some calls return their old results.
    - "replay": replay the calls of an archive.
    - "probe": collect facts about the kernels that the calls use here.
    """
    if what == "record":
        return load("recording_calls").record(**asked)
    if what == "merge":
        return load("recording_calls").merge(**asked)
    if what == "results":
        sets = {name: set(asked.pop(name)) for name in ("keys", "inputs")}
        return load("recording_calls").keep_results(**asked, **sets)
    if what == "exchange":
        return {"runs": load("exchanging").run_each(**asked)}
    # Imports torch, before memory is limited: the limit is for what an archive asks for.
    archive_of = load("call_archive").Archive
    device = asked.pop("device", "cpu")
    limit_memory(asked.pop("memory", None) if device == "cpu" else None)  # a context of CUDA maps all its memory
    archive = archive_of(asked.pop("folder"))
    only = asked.pop("only", None)
    if what == "replay":
        return load("replaying").replay(
            archive, asked.get("threads"), None if only is None else set(only), device, asked.get("package", "")
        )
    assert what == "probe"
    calls = [call for call in archive.calls if only is None or call["key"] in only]
    return {"probes": {call["key"]: load("order_probes").probe(archive, call) for call in calls}}


def answered(what: str, asked: dict[str, Any]) -> Any:
    """Return what `answer` returns, or a dict if the request is refused or the program fails:

    - "error": message of the error.
    - "kind": name of the error's class.
    """
    program = load("watched_program")
    refusals = (load("call_values").RefusedArchiveError, program.ProgramError, program.FailedProgramError)
    try:
        return answer(what, asked)
    except refusals as error:
        return {"error": str(error), "kind": type(error).__name__}
    except MemoryError:
        return {"error": "it needs more memory than the budget", "kind": "RefusedArchiveError"}


def limit_memory(budget: int | None) -> None:
    """Limit this process to `budget` more bytes of memory, since a forged call may request any size. None: no limit."""
    if budget is not None:
        with open("/proc/self/statm") as file:
            now = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + budget, now + budget))


def main() -> int:
    what, request, out = sys.argv[1:4]
    # Python puts the script's folder first; a program must not import this folder's modules by accident.
    sys.path[:] = [path for path in sys.path if path != os.path.dirname(os.path.abspath(__file__))]
    with open(request) as file:
        asked = json.load(file)
    with open(out, "w") as file:
        json.dump(answered(what, asked), file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
