"""What a device's kernels reach, and what predictions with that are worth."""

import dataclasses
import datetime
import os
import time
from collections.abc import Iterable, Sequence
from typing import Any

import jaxlib

from jaxmem.ground.errors import JaxmemError
from jaxmem.ground.words import pluralize
from jaxmem.levers.host.streaming import CHUNK
from jaxmem.reports.calibrating.fitted import Checked, check, errors_of, fit_rates, held_out
from jaxmem.reports.calibrating.probes import ladders
from jaxmem.reports.calibrating.running import Device, Sample, samples
from jaxmem.reports.drawn.tables import Part, Printed, Table
from jaxmem.reports.drawn.text import milliseconds
from jaxmem.targets import (
    LocalDevice,
    MeasuredRates,
    Target,
    bare_target,
    calibration_name,
    keep_calibration,
    known_targets,
    resolve,
)

_LEAST_SECONDS = 0.5  # chosen: of this a twentieth each is for launches and for copies
_ROWS = 6  # of a table in a terminal
# Of rates that nobody states: what is measured takes their place. 1 would do too, in arithmetic.
_UNSTATED = 1e9


@dataclasses.dataclass(frozen=True, repr=False)
class Calibration(Printed):
    """The rates that kernels reach on the attached device; `calibrate` measures them.

    Attributes:
        rates: what predictions use from now on: peaks and bandwidths in FLOPs and bytes per second,
            the shares of them that kernels reach, and the error that is left.
        stated: the device's figures as its maker states them; None: they are not known.
        fitted: which rates were measured; the others are as they were.
        checked: every program that ran beside its prediction.
        path: the file that the rates are kept in; empty: they are not kept.
    """

    rates: MeasuredRates
    stated: Target | None
    fitted: tuple[str, ...]
    checked: tuple[Checked, ...]
    path: str = ""

    @property
    def error(self) -> float:
        """The median of \\|predicted / measured - 1\\| over the programs that were held out."""
        return self.rates.error

    @property
    def high_error(self) -> float:
        """The 90th percentile of the same."""
        return self.rates.high_error

    def to_dict(self) -> dict[str, Any]:
        """All figures as plain data."""
        return {
            "rates": dataclasses.asdict(self.rates),
            "fitted": list(self.fitted),
            "checked": [dataclasses.asdict(one) | {"error": one.error} for one in self.checked],
            "path": self.path,
        }

    def _parts(self) -> Iterable[Part]:
        out = sum(one.is_held_out for one in self.checked)
        yield (
            f"calibrated: ±{self.error:.0%} on your {self.rates.device} (median; 90th percentile "
            f"±{self.high_error:.0%})"
        )
        yield (
            f"errors are of {pluralize(out, 'program')} that the rates were not fitted to; "
            f"{len(self.checked) - out} more were fitted"
        )
        if self.path:
            yield f"kept in {self.path}; `jaxmem calibrate --forget` removes it"
        yield ""
        yield self._table()
        worst = sorted(self.checked, key=lambda one: -abs(one.error) * one.is_held_out)
        rows = [
            (_time(one.measured), _time(one.predicted), f"{one.error:+.0%}", one.name)
            for one in worst[:_ROWS]
            if one.is_held_out
        ]
        heads = ("measured", "predicted", "error", "held out, the largest errors first")
        yield Table(heads, rows, left=(3,))

    def _table(self) -> Table:
        rates, stated = self.rates, self.stated
        rows = []
        for kind, peak in dataclasses.asdict(rates.peaks).items():
            if kind in self.fitted:
                of = getattr(stated.peaks, kind) if stated else 0.0
                rows.append(_row(f"matmul {kind}", rates.shares.matmul * peak, of, "FLOP/s"))
        if "convolution" in self.fitted:
            peak, of = rates.peaks.float32, 0.0
            if stated:
                peak, of = (one.flops_per_second("float32") for one in (rates.of(stated), stated))
            reached = rates.shares.convolution * peak
            rows.append(_row("convolution float32", reached, of, "FLOP/s"))
        if "memory" in self.fitted:
            of = stated.memory_bandwidth if stated else 0.0
            reached = rates.shares.memory * rates.memory_bandwidth
            rows.append(_row("memory", reached, of, "B/s"))
        if "host" in self.fitted:
            of = stated.host_bandwidth if stated else 0.0
            rows.append(_row("host memory", rates.shares.link * rates.host_bandwidth, of, "B/s"))
        rows.append(("launch of a kernel", _time(rates.shares.launch), "", ""))
        heads = ("", "reached", "stated", "share")
        return Table(heads if stated else heads[:2], [row[: 4 if stated else 2] for row in rows],
                     left=(0,))  # fmt: skip


def calibrate(*, seconds: float = 60, keep: bool = True) -> Calibration:
    """Measures what kernels reach on the attached device, so that predicted times are its own.

    Runs matmuls and convolutions of several sizes and types, elementwise streams, reductions,
    copies to the host's memory and a chain of tiny kernels, and fits `Target.peaks` and
    `Target.shares` to them. Every second one, and parts of networks, are held out: how far they are
    from their predictions is the error that is printed beside predicted times from then on.

    Args:
        seconds: about how long it may take. An accelerator wants a minute, mostly for autotuning.
        keep: whether plans, reports and `fit` use the result from now on. It is kept in the user's
            cache, one file for each kind of device and version of jaxlib, and holds for
            ``target="local"`` as for the target's name.

    Returns:
        A `Calibration`.

    Raises:
        JaxmemError: ``seconds`` is too short, what ran was too short to tell the rates, or the
            file cannot be written.

    >>> import jaxmem
    >>> calibration = jaxmem.calibrate(seconds=1, keep=False)
    >>> calibration.error <= calibration.high_error
    True
    """
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not (
        _LEAST_SECONDS <= seconds < float("inf")
    ):  # fmt: skip
        raise JaxmemError(
            f"jaxmem.calibrate takes seconds={_LEAST_SECONDS} or more; got {seconds!r}."
        )
    local = resolve("local")
    assert isinstance(local, LocalDevice)
    stated = known_targets()[local.known.name] if local.known else None
    began = time.perf_counter()
    device = Device(stated or bare_target(local, _UNSTATED))
    launch = device.launch(seconds / 20)
    host = device.host_bandwidth(CHUNK, seconds / 20)
    left = max(seconds - (time.perf_counter() - began), seconds / 2)
    memory = local.usable_bytes or 2**32
    # What takes less than this of a device's memory is over before the next call; with operands and
    # copies the largest has to fit. Chosen.
    least = 0 if local.platform == "cpu" else memory // 8192
    measured = list(samples(device, ladders(), left, range(least, memory // 16)))
    made = calibration(device.target, stated, launch, host, measured, calibration_name(local))
    if not keep:
        return made
    return dataclasses.replace(made, path=os.fspath(keep_calibration(made.rates)))


def calibration(
    target: Target,
    stated: Target | None,
    launch: float,
    host: float | None,
    measured: Sequence[Sample],
    name: str,
) -> Calibration:
    """What measurements tell of a device.

    Args:
        target: by whose rates they are read: the ``stated`` ones, if any.
        stated: the maker's figures.
        launch: seconds of starting a kernel.
        host: bytes per second to and from the host's memory; None: not measured.
        measured: what the programs took.
        name: by which the rates are kept.
    """
    if not measured:
        raise JaxmemError(
            f"No program ran on {target.description} for longer than it takes to call one. "
            "Calibrate for longer: `jaxmem calibrate --seconds 60`."
        )
    told = [
        one
        for one, is_held_out in zip(measured, held_out(measured), strict=True)
        if not is_held_out
    ]
    fitted, found = fit_rates(target, stated is not None, launch, told)
    if host is not None:
        fitted = dataclasses.replace(fitted, host_bandwidth=host / fitted.shares.link)
        found.append("host")
    elif stated is None:
        fitted = dataclasses.replace(fitted, host_bandwidth=0.0)
    checked = check(fitted, measured)
    error, high_error = errors_of(checked)
    rates = MeasuredRates(
        name=name,
        device=target.description,
        date=datetime.date.today().isoformat(),
        jaxlib=jaxlib.__version__,
        peaks=fitted.peaks,
        memory_bandwidth=fitted.memory_bandwidth,
        host_bandwidth=fitted.host_bandwidth,
        shares=fitted.shares,
        error=error,
        high_error=high_error,
    )
    return Calibration(rates, stated, tuple(found), tuple(checked))


def _row(name: str, reached: float, stated: float, unit: str) -> tuple[str, str, str, str]:
    share = f"{reached / stated:.0%}" if stated else ""
    return name, _rate(reached, unit), _rate(stated, unit) if stated else "", share


def _rate(rate: float, unit: str) -> str:
    scale, letter = next(
        (one for one in ((1e12, "T"), (1e9, "G"), (1e6, "M")) if rate >= one[0]), (1.0, "")
    )
    return f"{rate / scale:.4g} {letter}{unit}"


def _time(seconds: float) -> str:
    return milliseconds(seconds) if seconds >= 1e-3 else f"{1e6 * seconds:.3g} µs"
