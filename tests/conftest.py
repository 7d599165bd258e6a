"""What holds for every test: it forks and starts Python under the marker `ranks` alone, and leaves torch as it was."""

import gc
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from tabulate import tabulate

# Read when torch loads: sums must not hang on the machine's cores, and the workers share them.
os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")

# Graphs that one test's command traced serve the commands of others, in all workers, which inherit this; a user's own
# are neither read nor written.
GRAPHS = "BITPROOF_TEST_GRAPHS"
if GRAPHS not in os.environ:
    os.environ[GRAPHS] = f"{os.getpid()}:{tempfile.mkdtemp(prefix='bitproof-test-graphs-')}"
OWNER, _, KEPT_GRAPHS = os.environ[GRAPHS].partition(":")
os.environ["BITPROOF_CACHE"] = KEPT_GRAPHS

# What is ignored here would be in all that tests start: so it is below nohup, and in a shell's background.
for number, action in (
    (signal.SIGHUP, signal.SIG_DFL),
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGQUIT, signal.SIG_DFL),
):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, action)

ROOT = Path(__file__).parent.parent
# What traces whole steps, or computes as long: some seconds a test, where the others take a hundredth of one.
TRACES = (
    "tests/harness/graph/hazards/test_planted.py",
    "tests/harness/graph/passes/",
    "tests/harness/graph/backend/test_backends.py",
    "tests/harness/graph/test_dump.py",
    "tests/harness/graph/tracing/test_export_joint.py",
    "tests/harness/graph/test_extra_pass.py",
    "tests/harness/graph/test_flex_attention.py",
    "tests/harness/graph/analysis/test_halves.py",
    "tests/harness/graph/analysis/test_mixing.py",
    "tests/harness/graph/test_origin.py",
    "tests/harness/graph/test_parts.py",
    "tests/harness/graph/test_pipeline.py",
    "tests/harness/graph/tracing/test_runtime_checks.py",
    "tests/harness/graph/tracing/test_trace.py",
    "tests/harness/graph/test_verify.py",
    "tests/harness/graph/test_writer.py",
    "tests/harness/powers/shrink/test_bisect_passes.py",
    "tests/harness/localize/test_blame.py",
    "tests/harness/localize/logs/test_call_log.py",
    "tests/harness/localize/test_foreign.py",
    "tests/harness/powers/shrink/test_shrink_case.py",
    "tests/harness/powers/shrink/standalone/",
    "tests/harness/powers/proofs/",
    "tests/harness/powers/sensitivity/test_measure.py",
    "tests/harness/systems/test_cached_graph.py",
    "tests/harness/systems/test_compiled.py",
    "tests/harness/systems/test_graph.py",
    "tests/harness/systems/test_joint.py",
    "tests/harness/test_torch_compat.py",
    "tests/reference/layers/test_attention.py",
    "tests/reference/models/",
    "tests/reference/test_chunking.py",
)
FOUND = "{what} without the marker: put `pytestmark = pytest.mark.ranks` or `@pytest.mark.ranks` on it"


class Watch:
    """What the test at work has started, as Python's own audit events tell it."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.forbidden = False
        self.started: str | None = None

    def __call__(self, event: str, arguments: tuple[object, ...]) -> None:
        if not self.forbidden or event not in {"os.fork", "os.forkpty", "subprocess.Popen"} or os.getpid() != self.pid:
            return
        if event == "subprocess.Popen":
            command = arguments[1]
            program = Path(os.fsdecode(command[0] if isinstance(command, (list, tuple)) else command)).name
            counts_gpus = "torch.cuda.device_count()" in str(command)  # as a CUDA build does where no driver is
            if counts_gpus or not program.startswith(("python", "bitproof", "torchrun")):
                return
            self.started = f"starts {program}"
        else:
            self.started = "forks"
        pytest.fail(FOUND.format(what=self.started), pytrace=False)


WATCH = Watch()
sys.addaudithook(WATCH)


@pytest.fixture(scope="session")
def hosts() -> ModuleType:
    """The module, loaded before any fixture of a single test has changed what a host inherits."""
    from tests import hosts

    return hosts


@pytest.fixture
def one_host(hosts: ModuleType) -> Iterator[None]:
    """Runs within this process ask one host, which all tests share, in place of starting one each."""
    with hosts.one_host():
        yield


def pytest_unconfigure() -> None:
    """End the host; remove the graphs, in the process that made their folder."""
    if hosts := sys.modules.get("tests.hosts"):
        hosts.SharedHost.end()
    if str(os.getpid()) == OWNER:
        shutil.rmtree(KEPT_GRAPHS, ignore_errors=True)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show what tests recorded as rows of a table."""
    lines = [
        (report.outcome, dict(report.user_properties).get("row"))
        for key in ("passed", "failed")
        for report in terminalreporter.stats.get(key, [])
    ]
    rows = [{"": outcome} | row for outcome, row in lines if row is not None]
    if rows:
        terminalreporter.write_line(tabulate(rows, headers="keys", tablefmt="simple"))
        terminalreporter.write_line(f"{sum(row[''] == 'passed' for row in rows)} of {len(rows)} passed")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what traces, before pytest selects by marks."""
    for item in items:
        if item.path.relative_to(ROOT).as_posix().startswith(TRACES):
            item.add_marker("traces")


def pytest_collection_finish() -> None:
    """What is loaded by now stays to the end: no search for garbage need go through it again, a quarter of a second."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Set up fixtures of every scope under watch, as well as the test itself."""
    WATCH.forbidden, WATCH.started = item.get_closest_marker("ranks") is None, None
    try:
        return (yield)
    finally:
        WATCH.forbidden = False


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """What caught the refusal and went on has started a process all the same."""
    result = yield
    if WATCH.started:
        pytest.fail(FOUND.format(what=WATCH.started), pytrace=False)
    return result


@pytest.fixture(autouse=True)
def torch_as_it_was() -> Iterator[None]:
    """Which test a worker runs next is chance: none may find the threads or switches of another."""
    before = torch_switches()
    yield
    if "torch" in sys.modules:
        import torch

        # A worker's first test may be the one that loads torch: it leaves torch as it comes.
        before = before or (1, False, False, True, True, torch.float32)
        if torch_switches() == before:
            return
        threads, is_deterministic, only_warns, fills_memory, multithreads, dtype = before
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(is_deterministic, warn_only=only_warns)  # Inductor's own switch follows
        torch.utils.deterministic.fill_uninitialized_memory = fills_memory
        torch.autograd.set_multithreading_enabled(multithreads)
        torch.set_default_dtype(dtype)


def torch_switches() -> tuple:
    """What `torch_as_it_was` puts back; nothing where no test has needed torch yet."""
    if "torch" not in sys.modules:
        return ()
    import torch

    return (
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
        torch.autograd.is_multithreading_enabled(),
        torch.get_default_dtype(),
    )
