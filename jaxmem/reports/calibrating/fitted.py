"""The rates of a device that explain what its kernels took."""

import dataclasses
import statistics
from collections.abc import Iterable, Sequence

import numpy as np

from jaxmem.ground.errors import JaxmemError
from jaxmem.reports.calibrating.running import Sample
from jaxmem.reports.speed.kernels import CompiledKernel
from jaxmem.reports.speed.model import parts_of, seconds_of
from jaxmem.targets import UNLIMITED, AchievableShares, Peaks, Target

_ALONE = 0.5  # of a program's time: less, and it does not tell of the rate. Chosen.


@dataclasses.dataclass(frozen=True)
class Checked:
    """A program beside its prediction: ``is_held_out``: it was held out of the fit."""

    name: str
    measured: float
    predicted: float
    is_held_out: bool

    @property
    def error(self) -> float:
        """How far the prediction is from the measurement: 0.1: it is a tenth longer."""
        return self.predicted / self.measured - 1


def held_out(samples: Sequence[Sample]) -> list[bool]:
    """Which samples the rates are not fitted to: parts of networks, and of each ladder every second
    one from its largest but one."""
    is_held_out = [sample.whole for sample in samples]
    for ladder in dict.fromkeys(sample.ladder for sample in samples if not sample.whole):
        places = [at for at, sample in enumerate(samples) if sample.ladder == ladder]
        for place in places[::-1][1::2]:
            is_held_out[place] = True
    return is_held_out


def fit_rates(
    stated: Target, known: bool, launch: float, samples: Iterable[Sample]
) -> tuple[Target, list[str]]:
    """A target with the rates that explain what was measured.

    Args:
        stated: the target with its maker's figures.
        known: whether there are any; else the fitted rates take their place.
        launch: seconds of starting a kernel.
        samples: what was measured.

    Returns:
        The target, and which of its rates were fitted: fields of `Peaks` and of `AchievableShares`.

    Raises:
        JaxmemError: no figures are stated, and what was measured does not tell them.
    """
    used = list(samples)
    whole = AchievableShares(
        matmul=1.0,
        convolution=1.0,
        memory=1.0,
        cache=UNLIMITED,
        link=stated.shares.link,
        launch=launch,
    )
    target = _with(stated, whole)
    found = ["launch"]
    memory = _share(target, used, "")
    if memory is not None:
        target = _with(target, dataclasses.replace(target.shares, memory=memory))
        found.append("memory")
    rates = {
        kind: share
        for kind in _kinds(stated)
        if (share := _share(target, used, "matmul", kind)) is not None
    }
    if rates:
        target = _with_peaks(target, rates, known)
        found += ["matmul", *rates]
    more = _share(target, used, "convolution")
    if more is not None:
        convolution = more * target.shares.convolution
        target = _with(target, dataclasses.replace(target.shares, convolution=convolution))
        found.append("convolution")
    if known:
        # What was not measured keeps the share that it is assumed to reach.
        names = _SHARES if "matmul" in found else (*_SHARES, "cache")
        kept = {name: getattr(stated.shares, name) for name in names if name not in found}
        return _with(target, dataclasses.replace(target.shares, **kept)), found
    if "memory" not in found or "matmul" not in found:
        raise JaxmemError(
            f"What ran on {stated.description} was too short to tell its rates. Calibrate for "
            "longer: `jaxmem calibrate --seconds 60`, while nothing else runs."
        )
    reached = target.shares.memory * target.memory_bandwidth
    target = dataclasses.replace(target, memory_bandwidth=reached)
    return _with(target, dataclasses.replace(target.shares, memory=1.0)), found


_SHARES = ("matmul", "convolution", "memory")


def check(target: Target, samples: Sequence[Sample]) -> list[Checked]:
    """What was measured beside what is predicted with a target's rates."""
    return [
        Checked(sample.name, sample.seconds, _predicted(sample, target), is_held_out)
        for sample, is_held_out in zip(samples, held_out(samples), strict=True)
    ]


def errors_of(checked: Iterable[Checked]) -> tuple[float, float]:
    """The median and the 90th percentile of the errors of what was held out; of everything, where
    nothing was."""
    every = list(checked)
    found = [abs(one.error) for one in every if one.is_held_out] or [
        abs(one.error) for one in every
    ]
    return float(np.median(found)), float(np.quantile(found, 0.9))


def _predicted(sample: Sample, target: Target) -> float:
    return sum(times * seconds_of(kernel, target) for times, kernel in sample.kernels)


def _with(target: Target, shares: AchievableShares) -> Target:
    return dataclasses.replace(target, shares=shares)


def _with_peaks(target: Target, rates: dict[str, float], known: bool) -> Target:
    """One share for all matmuls, and peaks that differ from what is stated by as much as the shares
    of their types do. Without stated ones, the peaks are what is reached."""
    if known:
        shared = statistics.median(rates.values())
        peaks = {kind: getattr(target.peaks, kind) * rate / shared for kind, rate in rates.items()}
        made = dataclasses.replace(target, peaks=dataclasses.replace(target.peaks, **peaks))
        return _with(made, dataclasses.replace(target.shares, matmul=shared, convolution=shared))
    reached = {kind: getattr(target.peaks, kind) * rate for kind, rate in rates.items()}
    peaks = {"float32": max(reached.values())} | reached
    return dataclasses.replace(target, peaks=Peaks(**peaks))


def _share(target: Target, samples: list[Sample], what: str, kind: str = "") -> float | None:
    """By how much a rate of the target is to be multiplied to explain the samples in their median:
    that of contractions (of operands of a kind), or of the memory. None: no sample tells."""
    found = []
    for sample in samples:
        known = slow = 0.0  # seconds of what is not asked for, and of what is
        for times, kernel in sample.kernels:
            parts = parts_of(kernel, target)
            known += times * target.shares.launch
            if not what:
                slow += times * parts.traffic
            elif _is(kernel, what, kind, target):
                slow += times * parts.arithmetic
                known += times * parts.turning
            else:
                known += times * parts.seconds
        left = sample.seconds - known
        about = [_is(kernel, what, kind, target) for _, kernel in sample.kernels]
        if (any(about) if what else all(about)) and slow and left > _ALONE * sample.seconds:
            found.append(slow / left)
    return statistics.median(found) if found else None


def _is(kernel: CompiledKernel, what: str, kind: str, target: Target) -> bool:
    one = kernel.contraction
    if one is None or not what:
        return one is None and not what
    return one.kind == what and (not kind or _kind(kernel, target) == kind)


def _kinds(target: Target) -> list[str]:
    return [field for field, rate in dataclasses.asdict(target.peaks).items() if rate]


def _kind(kernel: CompiledKernel, target: Target) -> str:
    """Which of the target's peaks a contraction has: that of its rate where each has one of its
    own."""
    one = kernel.contraction
    assert one is not None
    kinds = _kinds(target)
    marks = {kind: float(number) for number, kind in enumerate(kinds, 1)}
    marked = dataclasses.replace(target, peaks=Peaks(**({"float32": 0.0} | marks)))
    rate = marked.flops_per_second(one.dtype, one.precision)
    return next((kind for kind, mark in marks.items() if mark == rate), "")
