"""Provide pytest fixtures that run cases, a marker that names a case, and divergences in failure reports.

    bitproof_run                            run a case and fail the test unless it gets its expected verdict
    bitproof_result                         the run of the case named by the test's marker, whatever its verdict
    bitproof_keeps_bits                     prove for every Inductor pass in the test that it keeps every bit
    @pytest.mark.bitproof(CASE, **options)  name the case, with options of `bitproof.run`

If a test fails after it ran cases, its report has a section for each case, with its divergence. Run folders are created
in pytest's temporary folder, or in DIR with `--bitproof-reports DIR`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# pytest loads this file whenever bitproof is installed, so other modules are imported only when a test needs them.
import pytest

_RUNS = pytest.StashKey[list[Any]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the command-line option for run folders."""
    group = parser.getgroup("bitproof")
    group.addoption("--bitproof-reports", metavar="DIR", help="where cases leave their run folders")


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker."""
    config.addinivalue_line("markers", "bitproof(case, **options): the case that `bitproof_result` runs")


@pytest.fixture
def bitproof_run(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., Any]:
    """A function with the parameters of `bitproof.run`, which fails the test unless the case has its expected verdict.

    It returns the `bitproof.Run`. Its further parameter `expect`, such as "DIFFERENT", replaces the case's expected
    verdict.
    """
    run = _runner(request, tmp_path)

    def run_and_check(case: Any = None, *, expect: str | None = None, **options: Any) -> Any:
        # pytest then shows the line of the test that called this.
        __tracebackhide__ = True
        done = run(case, **options)
        if expect is None and not done.as_expected:
            pytest.fail(str(done), pytrace=False)
        if expect not in (None, done.verdict):
            pytest.fail(f"{done}\n  expected here: {expect}", pytrace=False)
        return done

    return run_and_check


@pytest.fixture
def bitproof_result(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """The `bitproof.Run` of the case named by the test's marker."""
    marker = request.node.get_closest_marker("bitproof")
    if marker is None or len(marker.args) != 1:
        pytest.fail("bitproof_result needs a marker such as @pytest.mark.bitproof('moe_seq', steps=2)", pytrace=False)
    return _runner(request, tmp_path)(marker.args[0], **marker.kwargs)


@pytest.fixture
def bitproof_keeps_bits() -> Iterator[Any]:
    """During the test, each Inductor pass that runs must be proved to keep every bit; otherwise the test fails."""
    import bitproof

    with bitproof.keeps_bits() as kept:
        yield kept


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Add to a failed test's report the results of the cases that the test ran."""
    outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined]
    if report.when == "call" and report.failed:
        text = str(report.longrepr)
        for run in item.stash.get(_RUNS, []):
            # `bitproof_run` has already put the divergence into the failure itself.
            if str(run) not in text:
                report.sections.append((f"bitproof {run.result.case.name}", str(run)))


def _runner(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., Any]:
    import bitproof

    folder = request.config.getoption("--bitproof-reports")

    # The runs are stored for the report of a failing test.
    def run(case: Any = None, **options: Any) -> bitproof.Run:
        options.setdefault("report_dir", folder or tmp_path / "bitproof")
        done = bitproof.run(case, **options)
        request.node.stash.setdefault(_RUNS, []).append(done)
        return done

    return run
