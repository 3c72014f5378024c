"""What a step takes on the device that is there, beside what was compiled."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxmem.ground.bytes import format_bytes
from jaxmem.ground.checks import check_call
from jaxmem.ground.errors import JaxmemError
from jaxmem.reports.compiled import memory
from jaxmem.reports.report import MemoryReport
from jaxmem.reports.where.arguments import argument_names
from jaxmem.targets import HOST_KIND

_NO_STATISTICS = (
    "the {} keeps no statistics of its memory, so the allocator's peak is not known; the figures "
    "are the compiled ones"
)
_EARLIER_PEAK = (
    "the run did not raise the allocator's peak, which is of something earlier in this process; "
    "measure in a fresh one"
)


@dataclasses.dataclass(frozen=True, repr=False)
class Measured:
    """The allocator's figures round one run of a step, in bytes; `measure` makes it.

    ``arguments`` are the bytes of each argument's arrays on the first device, in the order in which
    they came into being (data and state: phases outside the executable). ``before`` and ``after``
    were in use round the run, ``peak`` is the allocator's since the process began (JAX cannot reset
    it) and ``earlier_peak`` what it was before the run; all four None where the device keeps no
    statistics. ``phases`` has the most live bytes in each phase inside the executable, by the
    compiled timeline. ``result`` is what the step returned.
    """

    compiled: MemoryReport
    arguments: dict[str, int]
    before: int | None
    after: int | None
    earlier_peak: int | None
    peak: int | None
    phases: dict[str, int]
    result: Any = dataclasses.field(compare=False)

    @property
    def others(self) -> int | None:
        """Bytes in use before the run that are not the step's arguments."""
        return None if self.before is None else self.before - sum(self.arguments.values())

    @property
    def unexplained(self) -> int | None:
        """The peak less the compiled bytes and less what else was in use; None where the run did
        not set the peak, or nothing is known of it."""
        if self.peak is None or self.others is None or self.peak <= (self.earlier_peak or 0):
            return None
        return self.peak - self.compiled.device - self.others

    def __str__(self):
        rows: list[tuple[str, int | None]] = [
            (f"argument {name}", size) for name, size in self.arguments.items()
        ]
        rows += [(f"live in {phase} (compiled)", size) for phase, size in self.phases.items()]
        rows += [
            ("device bytes (compiled)", self.compiled.device),
            ("in use besides", self.others),
            ("unexplained: rounding, kernels' workspace", self.unexplained),
            ("allocator's peak (measured)", self.peak),
        ]
        lines = [f"{name:44}{format_bytes(size):>14}" for name, size in rows if size is not None]
        if self.peak is None:
            device = self.compiled.target.description
            lines.append(f"note: {_NO_STATISTICS.format('CPU' if device == 'cpu' else device)}")
        elif self.unexplained is None:
            lines.append(f"note: {_EARLIER_PEAK}")
        return "\n".join(lines)

    __repr__ = __str__


def measure(step: Callable, *args: Any, **kwargs: Any) -> Measured:
    """Runs a step once on the attached device, and puts the allocator's peak beside the compiled
    bytes.

    Args:
        step: a function, or a jitted one. What it donates is gone afterwards: the new state is in
            `Measured.result`.
        *args, **kwargs: its arguments: arrays, or `jax.ShapeDtypeStruct`, for which zeros are made.

    Returns:
        A `Measured`, which prints data, state, the phases inside the executable and the peak, and
        what is left unexplained: rounding of allocations to 256 bytes, and workspace that kernels
        take while running, which no compilation counts. A CPU keeps no statistics: it says so.

    Raises:
        JaxmemError: the step does not take these arguments, or zeros cannot be made of one.

    >>> import jax.numpy as jnp, jaxmem
    >>> measured = jaxmem.measure(jnp.sin, jnp.ones((64, 64), jnp.float32))
    >>> measured.compiled.argument, measured.result.shape
    (16384, (64, 64))
    """
    check_call(step, args, kwargs, "jaxmem.measure")
    compiled = memory(step, *args, target="local", **kwargs)
    names = argument_names(step, args, kwargs)
    sizes = {}
    made: dict[Any, Any] = {}
    given: list[tuple[Any, Any]] = [*enumerate(args), *kwargs.items()]
    for key, value in given:
        made[key] = jax.block_until_ready(jax.tree.map(_concrete, value))
        sizes[names[key]] = sum(map(_bytes_on_device, jax.tree.leaves(made[key])))
    args = tuple(made[number] for number in range(len(args)))
    kwargs = {name: made[name] for name in kwargs}
    run: Any = step if hasattr(step, "trace") else jax.jit(step)
    run.lower(*args, **kwargs).compile()  # autotuning takes memory too, which is not the step's
    before, earlier = _statistics()
    result = jax.block_until_ready(run(*args, **kwargs))
    after, peak = _statistics()
    return Measured(compiled, sizes, before, after, earlier, peak, _by_phase(compiled), result)


def _by_phase(report: MemoryReport) -> dict[str, int]:
    """The most live bytes while each phase runs."""
    if not report.has_timeline:
        return {}
    most: dict[str, int] = {}
    for phase, live in zip(report.phases, report.timeline.live.tolist(), strict=True):
        most[phase] = max(most.get(phase, 0), live)
    order = ("forward", "loss", "backward", "recompute", "update")
    return {phase: most[phase] for phase in order if phase in most}


def _concrete(leaf: Any) -> Any:
    if not isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    try:
        return jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding)
    except (TypeError, ValueError) as error:
        raise JaxmemError(
            f"jaxmem.measure cannot make zeros of {leaf}: {error} Pass a real array for it."
        ) from error


def _device() -> jax.Device:
    """The device that is looked at: this process's first."""
    return jax.local_devices()[0]


def _bytes_on_device(leaf: Any) -> int:
    """Bytes of an array on the device."""
    if not isinstance(leaf, jax.Array) or leaf.sharding.memory_kind == HOST_KIND:
        return 0
    return sum(s.data.nbytes for s in leaf.addressable_shards if s.device == _device())


def _statistics() -> tuple[int | None, int | None]:
    """Bytes in use on the device, and the most that ever were; None where it does not say.

    `jax.Device.memory_stats` is None on some platforms, not implemented on others, and lacks
    figures or has -1 for them with some allocators.
    """
    try:
        known = _device().memory_stats() or {}
    except jax.errors.JaxRuntimeError:
        known = {}
    in_use, peak = (known.get(name, -1) for name in ("bytes_in_use", "peak_bytes_in_use"))
    return (in_use, peak) if min(in_use, peak) >= 0 else (None, None)
