"""Environments that change no bit of a torch operator: other memory, other variables, another user, the same kernels.

`drawn` draws variables and a command's prefix for a new process. `answer_forked` runs in it: it forks a process per
replay, and each child changes what a running process can still change, so that 2,000 environments import torch ten
times.
"""

from __future__ import annotations

import codecs
import ctypes
import json
import locale
import os
import random
import resource
import runpy
import sys
import time
from collections.abc import Callable
from typing import Any

VARIABLES: dict[str, tuple[str, ...]] = {
    "LC_ALL": ("C", "POSIX", "C.UTF-8", "de_DE.UTF-8", "tr_TR.UTF-8"),
    "TZ": ("UTC", "Asia/Kathmandu", "America/St_Johns", "Nowhere/None"),
    "MALLOC_PERTURB_": ("0", "1", "85", "170", "255"),
    "MALLOC_ARENA_MAX": ("1", "2", "64"),
    "MALLOC_TOP_PAD_": ("0", "65536", "67108864"),
    "MALLOC_MMAP_THRESHOLD_": ("4096", "131072", "1073741824"),
    "GLIBC_TUNABLES": ("glibc.malloc.tcache_count=0", "glibc.malloc.hugetlb=1", "glibc.malloc.mxfast=0"),
    "LD_BIND_NOW": ("1",),
    "PYTHONHASHSEED": ("0", "1", "77", "random"),
    "PYTHONMALLOC": ("malloc", "pymalloc"),
    "PYTHONUNBUFFERED": ("1",),
    "PYTHONFAULTHANDLER": ("1",),
    "THP_MEM_ALLOC_ENABLE": ("0", "1"),
    "OMP_WAIT_POLICY": ("active", "passive"),
    "OMP_PROC_BIND": ("false", "close", "spread"),
    "OMP_STACKSIZE": ("1M", "16M"),
    "OMP_DISPLAY_ENV": ("false",),
    "KMP_BLOCKTIME": ("0", "200"),
    "HOME": ("/nonexistent", "/tmp"),
    "TORCH_SHOW_CPP_STACKTRACES": ("1",),
    "TMPDIR": ("/tmp", "/var/tmp"),
    "USER": ("somebody",),
    "COLUMNS": ("7",),
}


CALLS = 25
"""Calls of an archive that are replayed in an environment."""


def drawn(draw: random.Random) -> tuple[list[str], dict[str, str]]:
    """A command's prefix and variables."""
    variables = {name: draw.choice(values) for name, values in VARIABLES.items() if draw.random() < 0.4}
    variables["PADDING"] = "x" * draw.randrange(100_000)  # moves the stack
    prefix = ["setarch", "-R"] if draw.random() < 0.3 else []
    if draw.random() < 0.5:
        prefix += ["nice", "-n", "1"]
    if draw.random() < 0.3:
        prefix += ["prlimit", f"--stack={draw.choice((1 << 20, 8 << 20, 64 << 20))}"]
    return prefix, variables


def _in_this_process(draw: random.Random) -> None:
    """Change the memory, the folder, the user and other properties of a running process."""
    libc = ctypes.CDLL(None, use_errno=True)
    changes: list[Callable[[], Any]] = [
        lambda: os.chdir(draw.choice(("/", "/tmp", "/usr/lib"))),
        lambda: os.nice(1),
        lambda: os.umask(draw.choice((0, 0o77, 0o777))),
        lambda: os.sched_setaffinity(0, {draw.choice([*os.sched_getaffinity(0)])}),
        lambda: locale.setlocale(locale.LC_ALL, draw.choice(("C", "C.UTF-8", ""))),
        lambda: os.environ.update(TZ=draw.choice(("UTC", "Asia/Tokyo"))) or time.tzset(),
        lambda: libc.mallopt(-6, draw.randrange(256)),  # M_PERTURB: fresh memory has these bytes
        lambda: libc.mallopt(-3, draw.choice((4096, 1 << 20, 1 << 30))),  # M_MMAP_THRESHOLD
        lambda: libc.mallopt(-2, draw.choice((0, 1 << 24))),  # M_TOP_PAD
        lambda: libc.prctl(41, draw.randrange(2), 0, 0, 0),  # PR_SET_THP_DISABLE
        lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64)),
        lambda: resource.setrlimit(resource.RLIMIT_CORE, (0, 0)),
        lambda: random.seed(draw.random()),
        lambda: os.setsid(),
        lambda: sys.setswitchinterval(draw.choice((1e-6, 1.0))),
    ]
    for change in changes:
        if draw.random() < 0.5:
            try:
                change()
            except (OSError, locale.Error):  # a locale that is not there, or a limit below the current one
                continue
    held = [bytearray(draw.randrange(1, 1 << draw.randrange(4, 18))) for _ in range(draw.randrange(400))]
    _KEPT[:] = held[:: draw.randrange(1, 5)]  # holes in the heap
    if os.getuid() == 0 and draw.random() < 0.3:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)


_KEPT: list[bytearray] = []


def answer_forked(start: str, seed: int, folders: list[str]) -> None:
    """Replay some calls of each archive in a child of its own; prints a line per child."""
    load = runpy.run_path(start)["load"]
    replay, archives = load("replaying").replay, {folder: load("call_archive").Archive(folder) for folder in folders}
    # Another user may not read this Python's library: everything is imported before.
    replay(archives[folders[0]], None, {archives[folders[0]].calls[0]["key"]})
    for encoding in ("ANSI_X3.4-1968", "ISO-8859-1", "UTF-8"):
        codecs.lookup(encoding)
    for index, folder in enumerate(folders):
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            status = 1
            try:
                draw = random.Random(f"{seed} {index}")
                calls = [call["key"] for call in archives[folder].calls]
                asked = {*draw.sample(calls, min(CALLS, len(calls)))}
                _in_this_process(draw)
                rows = replay(archives[folder], None, asked)["rows"]
                wrong = [{"key": key} | row for key, row in rows.items() if row["state"] != "equal"]
                print(json.dumps({"calls": len(rows), "wrong": wrong}), flush=True)
                status = 0
            except BaseException as error:
                print(json.dumps({"calls": 0, "wrong": [{"key": "", "state": repr(error)}]}), flush=True)
            finally:
                os._exit(status)
        os.waitpid(child, 0)


if __name__ == "__main__":
    answer_forked(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
