"""What kernels reached on devices of this machine, kept in the user's cache."""

import dataclasses
import json
import math
import os
import pathlib
import re

import jaxlib

from jaxmem.ground.errors import JaxmemError
from jaxmem.targets.accelerator import LocalDevice, Target
from jaxmem.targets.cache import cache_folder, put
from jaxmem.targets.links import Links
from jaxmem.targets.peaks import Peaks
from jaxmem.targets.shares import AchievableShares

_FORMAT = "jaxmem calibration 2"


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeasuredRates:
    """The measured rates of a device, as `Target` has them, and how far predictions with them are
    from what was measured.

    Attributes:
        name: of the target, or of the kind of device.
        device: what JAX calls the device.
        date: the day of the measurement, ``"2026-11-23"``.
        jaxlib: the version whose kernels were measured.
        peaks, memory_bandwidth, host_bandwidth, shares: those of `Target`.
        error: the median of |predicted / measured - 1| over kernels that were held out.
        high_error: its 90th percentile.
    """

    name: str
    device: str
    date: str
    jaxlib: str
    peaks: Peaks
    memory_bandwidth: float
    host_bandwidth: float
    shares: AchievableShares
    error: float
    high_error: float

    def of(self, target: Target) -> Target:
        """A target with these rates."""
        return dataclasses.replace(
            target,
            peaks=self.peaks,
            memory_bandwidth=self.memory_bandwidth,
            host_bandwidth=self.host_bandwidth,
            shares=self.shares,
            time_error=self.error,
            calibrated=self.date,
        )


def calibrated(target: Target) -> Target:
    """A target with the rates that were measured on this machine; as it is where there are none."""
    found = recall(target.name)
    return found.of(target) if found else target


def rated(target: Target | LocalDevice) -> Target | None:
    """A target whose rates are known: itself, that of an attached device, or what a calibration of
    the attached device tells; None: nothing is known."""
    if isinstance(target, Target):
        return target
    found = target.known or recall(calibration_name(target))
    return found.of(bare_target(target)) if isinstance(found, MeasuredRates) else found


def bare_target(device: LocalDevice, rate: float = 1.0) -> Target:
    """An attached device as a target of which no figures are stated: ``rate`` in their place."""
    return Target(
        name=calibration_name(device),
        description=device.description,
        memory_bytes=device.memory_bytes,
        memory_bandwidth=rate,
        peaks=Peaks(float32=rate, bfloat16=rate, float16=rate),
        host_bandwidth=rate,
        links=Links(inside=rate, network=rate),
        source="",
        count=device.count,
    )


def calibration_name(device: Target | LocalDevice) -> str:
    """By which the calibration of a device is kept."""
    if isinstance(device, Target) or device.known:
        assert device.known
        return device.known.name
    return re.sub(r"[^a-z0-9]+", "-", device.description.lower()).strip("-")


def calibration_path(name: str) -> pathlib.Path:
    """Where the calibration of a device is kept: ``JAXMEM_CALIBRATIONS``, or jaxmem's cache. Other
    versions of jaxlib have other kernels, and so files of their own.

    Raises:
        JaxmemError: there is no home folder.
    """
    return _folder() / f"{name}-jaxlib-{jaxlib.__version__}.json"


def recall(name: str) -> MeasuredRates | None:
    """What was measured of a device; None: nothing, or the file is damaged or another's."""
    try:
        about = json.loads(calibration_path(name).read_text("utf-8"))
        if about.pop("format") != _FORMAT:
            return None
        peaks, shares = Peaks(**about.pop("peaks")), AchievableShares(**about.pop("shares"))
        found = MeasuredRates(**about, peaks=peaks, shares=shares)
        ours = found.name == name and found.jaxlib == jaxlib.__version__
        return found if ours and _sound(found) else None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, JaxmemError):
        return None


def keep_calibration(rates: MeasuredRates) -> pathlib.Path:
    """Keeps what was measured, and returns where.

    Raises:
        JaxmemError: the folder cannot be written.
    """
    path = calibration_path(rates.name)
    about = {"format": _FORMAT, **dataclasses.asdict(rates)}
    try:
        put(path, (json.dumps(about, indent=1) + "\n").encode())
    except OSError as error:
        raise JaxmemError(
            f"The calibration cannot be kept in {path}: {error}. Set JAXMEM_CACHE to a folder that "
            "can be written."
        ) from error
    return path


def forget_calibration(name: str) -> list[pathlib.Path]:
    """Removes what was measured of a device, with every version of jaxlib.

    Raises:
        JaxmemError: a file cannot be removed.
    """
    paths = sorted(_folder().glob(f"{name}-jaxlib-*.json"))
    try:
        for path in paths:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise JaxmemError(f"The calibration cannot be removed: {error}.") from error
    return paths


def _folder() -> pathlib.Path:
    chosen = os.environ.get("JAXMEM_CALIBRATIONS")
    return pathlib.Path(chosen) if chosen else cache_folder() / "calibrations"


def _sound(rates: MeasuredRates) -> bool:
    """Whether its figures are ones that times can be predicted with."""
    words = (rates.name, rates.device, rates.date, rates.jaxlib)
    shares, peaks = (list(dataclasses.asdict(one).values()) for one in (rates.shares, rates.peaks))
    positive = [*shares, rates.memory_bandwidth, rates.peaks.float32]
    others = [*peaks, rates.host_bandwidth, rates.error, rates.high_error]
    if not all(isinstance(word, str) for word in words):
        return False
    if not all(type(figure) in (int, float) for figure in positive + others):
        return False
    finite = all(math.isfinite(figure) and figure >= 0 for figure in positive + others)
    return finite and min(positive) > 0
