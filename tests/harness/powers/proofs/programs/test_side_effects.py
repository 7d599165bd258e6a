"""What a program keeps where no copy of its inputs has it is refused: a count in a file, in a default, in a module."""

from __future__ import annotations

import array
import atexit
import collections
import contextvars
import copy
import ctypes
import enum
import functools
import io
import itertools
import logging
import math
import mmap
import os
import queue
import random
import re
import sqlite3
import subprocess
import sys
import tempfile
import threading
import types

import numpy
import pytest
import torch
from torch import nn

import bitproof
from bitproof.harness.powers.proofs.prover.programs import side_effects
from tests.harness.powers.proofs.programs.test_compared_run import reason

X = torch.linspace(1, 2, 12).view(3, 4)
NEVER = 1000
"""A count that no test reaches: the two programs do the same each time that they are proved."""

FOLDER = tempfile.mkdtemp(prefix="outside-")


@pytest.fixture(autouse=True)
def as_before():
    """Take back what programs leave in other packages' classes and modules, in this thread and in the arguments."""
    spaces = [nn.Linear, math, threading.current_thread()]
    known, words = [{*vars(space)} for space in spaces], [*sys.argv]
    yield
    for space, names in zip(spaces, known, strict=True):
        for name in vars(space).keys() - names:
            delattr(space, name)
    sys.argv[:] = words


def counted(earlier):
    """A program that is another after `NEVER` calls, where `earlier()` counts those before."""

    def program(x):
        return x * (2 if earlier() < NEVER else 3)

    return program


def plain(x):
    return x * 2


def _defaults(kept=[]):  # noqa: B006 (what is tested)
    kept.append(0)
    return len(kept)


def _keyword_defaults(*, kept=[]):  # noqa: B006
    kept.append(0)
    return len(kept)


def _closure():
    count = 0

    def earlier():
        nonlocal count
        count += 1
        return count

    return earlier


IN_CLOSURE = _closure()
COUNTER = itertools.count().__next__
APPENDED: list[int] = []
APPEND = APPENDED.append
LOGGER = logging.getLogger("of a test")
LOGGER.setLevel(10)
DATABASE = sqlite3.connect(":memory:")
DATABASE.execute("create table t (a)")
FILE = open(os.path.join(FOLDER, "open"), "w")  # noqa: SIM115
atexit.register(FILE.close)
NUMBER = os.open(os.path.join(FOLDER, "number"), os.O_RDWR | os.O_CREAT)
PIPE = os.pipe()
os.set_blocking(PIPE[0], False)
HIDDEN = {"a": [0]}
VARIABLE = contextvars.ContextVar("of a test", default=0)


class Kind(enum.Enum):
    A = 1


class Private:
    __slots__ = ("__count",)

    def __init__(self):
        self.__count = 0

    def earlier(self):
        self.__count += 1
        return self.__count


PRIVATE = Private()


class Dunder:
    pass


@functools.cache
def _cached():
    return []


def by_default():
    return _defaults()


def by_keyword():
    return _keyword_defaults()


def by_closure():
    return IN_CLOSURE()


def by_bound_counter():
    return COUNTER()


def by_bound_append():
    APPEND(0)
    return len(APPENDED)


def by_attribute_of_a_function():
    by_attribute_of_a_function.count = getattr(by_attribute_of_a_function, "count", 0) + 1
    return by_attribute_of_a_function.count


def by_name_of_a_function():
    plain.__doc__ = f"{plain.__doc__}x"
    return len(plain.__doc__)


def by_others_module():
    math.count = getattr(math, "count", 0) + 1
    return math.count


def by_others_class():
    nn.Linear.count = getattr(nn.Linear, "count", 0) + 1
    return nn.Linear.count


def by_others_list():
    sys.argv.append("")
    return len(sys.argv)


def by_dunder_of_a_class():
    Dunder.__count__ = getattr(Dunder, "__count__", 0) + 1
    return Dunder.__count__


def by_member_of_an_enum():
    Kind.A.count = getattr(Kind.A, "count", 0) + 1
    return Kind.A.count


def by_private_slot():
    return PRIVATE.earlier()


def by_text():
    kept = globals()["HID" + "DEN"]["a"]
    kept[0] += 1
    return kept[0]


def by_cached_list():
    _cached().append(0)
    return len(_cached())


def by_logger():
    LOGGER.setLevel(LOGGER.level + 1)
    return LOGGER.level


def by_logger_found_by_name():
    found = logging.getLogger("of no variable")
    found.addHandler(logging.NullHandler())
    return len(found.handlers)


@functools.singledispatch
def dispatched(x):
    return 0


def by_registry():
    dispatched.register(type("Another", (), {}), dispatched)
    return len(dispatched.registry)


def by_subclasses():
    made = type("Another", (collections.UserString,), {})
    made.itself = made
    return len(collections.UserString.__subclasses__())


def by_what_runs_at_the_end():
    atexit.register(int)
    return atexit._ncallbacks()


def by_random_numbers_of_the_system():
    return NEVER if os.urandom(8) == bytes(8) else 0


def by_node_of_autograd():
    node = GROWN.grad_fn
    node.metadata["count"] = node.metadata.get("count", 0) + 1
    return node.metadata["count"]


GROWN = torch.zeros(1, requires_grad=True) * 2


def by_thread():
    threading.current_thread().count = getattr(threading.current_thread(), "count", 0) + 1
    return threading.current_thread().count


def by_context_variable():
    VARIABLE.set(VARIABLE.get() + 1)
    return VARIABLE.get()


def by_database():
    DATABASE.execute("insert into t values (1)")
    return DATABASE.execute("select count(*) from t").fetchone()[0]


def by_environment():
    os.environ["OF_A_TEST"] = str(int(os.environ.get("OF_A_TEST", "0")) + 1)
    return int(os.environ["OF_A_TEST"])


def by_file():
    path = os.path.join(FOLDER, "count")
    with open(path, "a") as file:
        file.write("x")
    return os.path.getsize(path)


def by_swallowed_refusal():
    try:
        return by_file()
    except Exception:
        return 0


def by_file_of_torch():
    path = os.path.join(FOLDER, "count.pt")
    earlier = torch.load(path) if os.path.exists(path) else 0
    torch.save(earlier + 1, path)
    return earlier


def by_array_file():
    path = os.path.join(FOLDER, "count.npy")
    numpy.save(path, numpy.zeros(1))
    return 0


def by_open_file():
    return FILE.write("x") + FILE.send()


def by_number_of_a_file():
    return os.write(NUMBER, b"x") + os.lseek(NUMBER, 0, 1)


def by_pipe():
    return os.write(PIPE[1], b"x")


def by_folder():
    os.mkdir(os.path.join(FOLDER, str(len(os.listdir(FOLDER)))))
    return len(os.listdir(FOLDER))


def by_process():
    return subprocess.run(["true"]).returncode


def by_caller():
    return NEVER if sys._getframe().f_code.co_name == "no" else 0


def by_written_code():
    return eval("0")


def by_exchanged_class():
    made = types.SimpleNamespace()
    made_class = type("Made", (), {})
    made = made_class()
    made.__class__ = type("Other", (), {})
    return 0


def by_mask():
    return os.umask(os.umask(0o22) ^ 0o1)


KEPT = [
    *(by_default, by_keyword, by_closure, by_bound_counter, by_bound_append, by_attribute_of_a_function),
    *(by_name_of_a_function, by_others_module, by_others_class, by_others_list, by_dunder_of_a_class),
    *(by_member_of_an_enum, by_private_slot, by_text, by_cached_list, by_logger, by_thread, by_context_variable),
    by_logger_found_by_name,
    *(by_registry, by_subclasses, by_what_runs_at_the_end, by_random_numbers_of_the_system, by_node_of_autograd),
    *(by_database, by_environment, by_file, by_swallowed_refusal, by_file_of_torch, by_array_file, by_open_file),
    *(by_number_of_a_file, by_pipe, by_folder, by_process, by_caller, by_written_code, by_exchanged_class, by_mask),
]


@pytest.mark.parametrize("earlier", KEPT, ids=lambda x: x.__name__)
def test_a_count_that_no_copy_has_is_refused(earlier):
    program = counted(earlier)
    for pair in ((plain, program), (program, program)):
        assert reason(*pair, X), "PROVED"


def test_what_is_refused_as_it_happens_never_happens():
    path = os.path.join(FOLDER, "never")

    def program(x):
        with open(path, "w"):
            return x * 2

    assert reason(program, program, X) == f"it opens '{path}' to write, which nothing compares, in the program"
    assert not os.path.exists(path)
    with open(path, "w"):
        pass  # nothing is refused afterwards


class Words(str):
    """Text with more to it."""


@pytest.mark.parametrize(
    ("made", "earlier"),
    [
        (lambda: ctypes.c_int(0), lambda x: setattr(x, "value", x.value + 1)),
        (io.StringIO, lambda x: x.write("x")),
        (io.BytesIO, lambda x: x.write(b"x")),
        (queue.SimpleQueue, lambda x: x.put(0)),
        (lambda: random.Random(0), lambda x: x.random()),
        (lambda: mmap.mmap(-1, 8), lambda x: x.write(b"x")),
        (threading.local, lambda x: setattr(x, "count", getattr(x, "count", 0) + 1)),
        (lambda: array.array("i", [0]), lambda x: x.append(0)),
        (lambda: types.SimpleNamespace(kept=Words("")), lambda x: setattr(x, "kept", Words(x.kept + "x"))),
        (lambda: collections.defaultdict(itertools.count().__next__), lambda x: x.default_factory()),
        (lambda: functools.partial([].append, 0), lambda x: x()),
    ],
)
def test_an_object_written_in_c_shows_what_changes_in_it_or_is_refused(made, earlier):
    def program(x, kept):
        earlier(kept)
        return x * 2

    assert reason(lambda x, kept: x * 2, program, X, made())


@functools.lru_cache
def factor(n):
    return 1 / math.sqrt(n)


PATTERN, LOCK, NUMBERS = re.compile("a+"), threading.Lock(), random.Random(0)
Pair = collections.namedtuple("Pair", "first second")


def ordinary(model, x):
    """Reads of what others may not write, and what a training step may do: print, log, look at a file."""
    print("a step", file=sys.stderr)
    LOGGER.debug("a step")
    for module in model.modules():
        module.train()
    with LOCK, open(os.devnull, "w") as nothing:
        nothing.write("x")
    with open(__file__) as file:
        is_there = PATTERN.match("aa") and file.readline() and os.environ.get("HOME", "") is not None
    pair = Pair(x, torch.ops.aten.hardswish(model(x)))
    return pair.first * factor(4) + pair.second if is_there else x


def test_what_only_reads_is_proved():
    found = bitproof.prove(ordinary, ordinary, nn.Linear(4, 4), X)
    assert found.verdict == "PROVED" and found.induction.holds, found


def test_a_file_that_is_mapped_twice_is_one_memory(tmp_path):
    path = str(tmp_path / "shared")

    def once(a, b):
        a.add_(1)
        return b * 2

    def otherwise(a, b):
        result = b * 2
        a.add_(1)
        return result

    def mapped():
        X.numpy().tofile(path)
        return [torch.from_file(path, shared=True, size=12) for _ in "ab"]

    assert not torch.equal(once(*mapped()), otherwise(*mapped()))
    assert "share memory that a program writes" in reason(once, otherwise, *mapped())
    assert bitproof.prove(once, otherwise, X.clone(), X.clone()).verdict == "PROVED"


def test_threads_that_were_there_before_may_write(tmp_path):
    begin, done = threading.Event(), threading.Event()
    heard = []

    def write():
        begin.wait(60)
        try:
            (tmp_path / "file").write_text("x")
        except Exception as error:
            heard.append(error)
        done.set()

    threading.Thread(target=write).start()
    with side_effects.refusing_side_effects(lambda path: True):
        begin.set()
        assert done.wait(60)
    assert not heard and (tmp_path / "file").read_text() == "x"


def test_state_of_a_process_can_be_compared():
    assert side_effects.process_state() == copy.deepcopy(side_effects.process_state())


@pytest.mark.ranks
def test_a_file_that_a_parent_process_has_open_too_is_not_compared_and_ones_own_is(tmp_path):
    """Under a test runner whose output goes to a file, workers inherit the file, and the runner goes on writing."""
    script = (
        "import sys; from bitproof.harness.powers.proofs.prover.programs import side_effects\n"
        "own = open(sys.argv[2], 'w'); found = side_effects._open_files()\n"
        "print(int(sys.argv[1]) in found, own.fileno() in found)"
    )
    with open(tmp_path / "log", "w") as log:
        command = [sys.executable, "-c", script, str(log.fileno()), str(tmp_path / "own")]
        done = subprocess.run(command, pass_fds=[log.fileno()], capture_output=True, text=True, check=True)
    assert done.stdout == "False True\n"
