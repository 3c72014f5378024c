"""Probes run on the attached device."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterable, Iterator

import jax
import jax.numpy as jnp

from jaxmem.reports.calibrating.probes import Ladder, Probe, empty_probe, launch_probe
from jaxmem.reports.speed.kernels import CompiledKernel
from jaxmem.reports.speed.schedule import KernelSchedule
from jaxmem.targets import HOST_KIND, Target

# Repeats of one program; at least so many that the median is none of the first, slower ones.
_LEAST, _MOST = 5, 50
# A program that runs for less than so many calls of an empty one tells of the calls. Chosen.
_CALLS = 4
_WARM = 2  # calls before the first that counts. Chosen: one that compiles, and one more


@dataclasses.dataclass(frozen=True)
class Sample:
    """What one program took: the kernels that it runs, how often each, and the measured seconds of
    one run, without those of calling it from Python."""

    name: str
    ladder: str
    kernels: tuple[tuple[int, CompiledKernel], ...]
    seconds: float
    whole: bool = False


class Device:
    """The attached device, on which programs are timed. ``target``: reads what is compiled."""

    def __init__(self, target: Target):
        self.target = target
        self.device = jax.local_devices()[0]
        self.call = 0.0  # seconds of calling a program from Python, without its kernel's launch

    def launch(self, seconds: float) -> float:
        """Seconds of starting a kernel, of a chain of them; ``call`` is known afterwards."""
        (empty, one), (chain, many) = (
            self.median(probe, seconds / 2) for probe in (empty_probe(), launch_probe())
        )
        count, first = (sum(times for times, _ in kernels) for kernels in (many, one))
        # Never 0: clocks are coarse, and a chain may be as fast as a call.
        launch = max((chain - empty) / max(count - first, 1), 1e-9)
        self.call = max(empty - first * launch, 0.0)
        return launch

    def median(
        self, probe: Probe, seconds: float
    ) -> tuple[float, tuple[tuple[int, CompiledKernel], ...]]:
        """Seconds of one run of a probe, and its kernels."""
        args = self._made(probe)
        compiled = jax.jit(probe.fun).lower(*args).compile()
        kernels = tuple(
            (one.times, one.kernel)
            for one in KernelSchedule(compiled.as_text(), self.target).ran
            if one.kernel
        )
        return timed(lambda: compiled(*args), seconds), kernels

    def host_bandwidth(self, size: int, seconds: float) -> float | None:
        """Bytes per second between the device and memory of the host that it reads by itself, the
        slower way; None: there is no such memory."""
        device_memory = jax.sharding.SingleDeviceSharding(self.device)
        host_memory = jax.sharding.SingleDeviceSharding(self.device, memory_kind=HOST_KIND)
        try:
            on_device = jax.device_put(jnp.zeros(size, jnp.uint8), device_memory)
            on_host = jax.block_until_ready(jax.device_put(on_device, host_memory))
        except (ValueError, jax.errors.JaxRuntimeError):
            return None
        ways = [(on_device, host_memory), (on_host, device_memory)]
        slower = max(
            timed(lambda x=x, to=to: jax.device_put(x, to, may_alias=False), seconds / 2)
            for x, to in ways
        )
        return size / max(slower - self.call, 1e-9)

    def _made(self, probe: Probe) -> list[jax.Array]:
        """Arrays of numbers of every size about 1: what is all zeros takes less power, and time."""

        def make(shape: jax.ShapeDtypeStruct):
            wave = jnp.sin(jax.lax.iota(jnp.float32, shape.size))
            return (0.1 * wave).reshape(shape.shape).astype(shape.dtype)

        return [jax.jit(make, static_argnums=0)(shape) for shape in probe.shapes]


def timed(run: Callable, seconds: float) -> float:
    """The median of repeated runs, which may take so many seconds altogether."""
    for _ in range(_WARM):
        began = time.perf_counter()
        jax.block_until_ready(run())
        once = time.perf_counter() - began
    count = min(max(int(seconds / max(once, 1e-9)), _LEAST), _MOST)
    found = []
    for _ in range(count):
        began = time.perf_counter()
        jax.block_until_ready(run())
        found.append(time.perf_counter() - began)
    return statistics.median(found)


def samples(
    device: Device, ladders: Iterable[Ladder], seconds: float, sizes: range
) -> Iterator[Sample]:
    """Climbs all ladders side by side for about so many seconds: each as far as one run takes a
    tenth of its share of them and its arrays fit; the first rung that is long enough in any case.

    Args:
        device: where they run.
        ladders: what is run.
        seconds: altogether.
        sizes: bytes that a probe's arguments may take.
    """
    climbing = [(ladder, iter(ladder.probes)) for ladder in ladders]
    each = seconds / len(climbing)
    end, first = time.perf_counter() + seconds, True
    while climbing and (first or time.perf_counter() < end):
        going = []
        for ladder, rungs in climbing:
            if not first and time.perf_counter() >= end:
                break
            # A sixth and a tenth of what a ladder has: chosen, so that several rungs are measured.
            sample = _next(device, ladder, rungs, each / 6, sizes)
            if sample is None:
                continue
            yield sample
            if sample.seconds < each / 10 / _LEAST:
                going.append((ladder, rungs))
        climbing, first = going, False


def _next(
    device: Device, ladder: Ladder, rungs: Iterator[Probe], seconds: float, sizes: range
) -> Sample | None:
    """The next rung that takes longer than calling it does; None: there is none, or its values do
    not fit, or the device has no kernel for it."""
    for probe in rungs:
        if probe.bytes < sizes.start:
            continue
        if probe.bytes >= sizes.stop:
            return None
        try:
            taken, kernels = device.median(probe, seconds)
        except jax.errors.JaxRuntimeError:
            return None
        if taken >= _CALLS * device.call:
            taken -= device.call
            return Sample(probe.name, ladder.name, kernels, taken, ladder.whole)
        if taken < 2 * device.call:
            next(rungs, None)  # far too short: compiling the next one is not worth it
    return None
