"""Memory as a test: `assert_fits`, and an option of pytest that writes its baselines.

In a ``conftest.py``: ``pytest_plugins = ["jaxmem.pytest"]``.
"""

import json
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import filelock

from jaxmem.ground.bytes import device_budget, format_against, format_bytes
from jaxmem.ground.errors import JaxmemError
from jaxmem.reports import MemoryReport, diff, memory, summary
from jaxmem.reports.drawn.report_text import report_parts
from jaxmem.reports.drawn.tables import as_text
from jaxmem.targets import LocalDevice, Target

_OPTION = "--jaxmem-update"
_updates = False


def assert_fits(
    step: Callable,
    args: Sequence[Any],
    *,
    target: str | Target | LocalDevice,
    budget: int | str | None = None,
    baseline: str | os.PathLike | None = None,
    name: str | None = None,
    tolerance: float = 0.01,
) -> MemoryReport:
    """Compiles a step, and fails if it does not fit or takes more than it did.

    Args:
        step, args: as for `jaxmem.memory`: a function, jitted or not, and its arguments, real or
            `jax.ShapeDtypeStruct`. Nothing runs.
        target: the accelerator to compile for, which need not be there.
        budget: device bytes, an int or text such as ``"11GiB"`` or ``"80%"``; None: what is usable
            on the target.
        baseline: a JSON file that knows what the step took: one entry for each name.
            ``pytest --jaxmem-update`` writes it; commit it.
        name: of the entry; None: that of the test that runs.
        tolerance: the share by which the device bytes may grow beyond the baseline.

    Returns:
        The `MemoryReport`, for further assertions.

    Raises:
        AssertionError: the step does not fit, which prints the report; or it grew, which prints
            what grew: phases, kinds, modules, lines and values.
        JaxmemError: the baseline cannot be read, or has no entry of this name.
        BudgetError: the budget does not parse.

    >>> import jax, jax.numpy as jnp
    >>> from jaxmem.pytest import assert_fits
    >>> x = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
    >>> report = assert_fits(jnp.sin, (x,), target="h200", budget="10MiB")
    >>> assert_fits(jnp.sin, (x,), target="h200", budget="5MiB")
    Traceback (most recent call last):
        ...
    AssertionError: does not fit: 8.00 MiB is 3.00 MiB more than the budget of 5.00 MiB
    ...
    """
    __tracebackhide__ = True
    report = memory(step, *args, target=target)
    usable = report.target.usable_bytes
    allowed = None if budget is None else device_budget(budget, usable, report.target.name)
    if not report.fits(allowed):
        raise AssertionError(as_text(report_parts(report, allowed)))
    if baseline is not None:
        _compare(report, pathlib.Path(baseline), name or _running(), tolerance)
    return report


def _compare(report: MemoryReport, path: pathlib.Path, name: str, tolerance: float) -> None:
    __tracebackhide__ = True
    if _updates:
        _write(path, name, summary(report))
        return
    known = _read(path)
    if name not in known:
        raise JaxmemError(
            f"The baseline {path} has no entry {name!r}. `pytest {_OPTION}` writes one; commit it."
        )
    before = known[name]["device"]
    if report.device <= before * (1 + tolerance):
        return
    found = diff(known[name], report)
    grew = f"{format_bytes(before)} -> {format_against(report.device, before)}"
    share = (report.device - before) / max(before, 1)
    raise AssertionError(
        f"grew by {share:.1%}: {grew} (allowed: {tolerance:.1%})\n{found}\n"
        f"If it is meant to, `pytest {_OPTION}` writes the baseline anew."
    )


def _running() -> str:
    """The test that runs, as pytest names it."""
    name = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    if not name:
        raise JaxmemError("No test of pytest runs: assert_fits(baseline=) needs a name=.")
    return name


def _read(path: pathlib.Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise JaxmemError(f"The baseline {path} is no JSON: {error}.") from error
    if not isinstance(found, dict):
        raise JaxmemError(f"The baseline {path} holds no entries by name.")
    return found


def _write(path: pathlib.Path, name: str, entry: dict[str, Any]) -> None:
    """One entry; tests that run beside each other write one after the other."""
    with filelock.FileLock(f"{path}.lock"):
        known = _read(path) | {name: entry}
        path.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n", "utf-8")


def pytest_addoption(parser) -> None:
    """Pytest's hook: the option."""
    about = "write the baselines of jaxmem.pytest.assert_fits instead of comparing with them"
    parser.getgroup("jaxmem").addoption(_OPTION, action="store_true", help=about)


def pytest_configure(config) -> None:
    """Pytest's hook: whether baselines are written."""
    global _updates
    _updates = config.getoption(_OPTION)
