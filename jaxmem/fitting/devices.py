"""The fewest devices that a training step fits on."""

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import optax

from jaxmem import jaxprs
from jaxmem.fitting.search import LeverSearch
from jaxmem.fitting.table import Fitting, time_error
from jaxmem.fitting.verdicts import permissions
from jaxmem.fitting.workload import Workload
from jaxmem.ground.bytes import format_against, format_bytes
from jaxmem.ground.checks import check_count
from jaxmem.ground.errors import BudgetError, CompileError, JaxmemError
from jaxmem.ground.progress import tell
from jaxmem.ground.words import pluralize
from jaxmem.rematerialization import time_error_text
from jaxmem.reports.drawn.tables import Part, Printed, Table
from jaxmem.targets import LocalDevice, Target, resolve
from jaxmem.targets.links import NODE
from jaxmem.training import TrainStep

# Times the budget: of a step that is projected to take more, nothing is compiled. Chosen well above
# the farthest that compiled bytes were below projected ones (benchmarks/scale/stages.py: by 14 %);
# twice would cost compilations, and less could miss a number of devices that is enough.
_HOPELESS = 1.5
_KNOWN = {"mesh", "devices"}  # of jaxmem.fit's options, those that are searched
_OPTIONS = {
    name
    for name, one in inspect.signature(Workload).parameters.items()
    if one.kind is one.KEYWORD_ONLY and name not in {*_KNOWN, "target"}
}


@dataclasses.dataclass(frozen=True, slots=True)
class Tried:
    """A number of devices that was considered.

    Attributes:
        devices: how many.
        bytes: of each device: of the step that was chosen, or the fewest that were met.
        compiled: whether XLA says so; else they are projected.
        said: the step that was chosen, or why there is none.
        seconds: predicted time of the step that was chosen, or None.
    """

    devices: int
    bytes: int
    compiled: bool
    said: str
    seconds: float | None = None


@dataclasses.dataclass(frozen=True)
class DevicesNeeded(Printed):
    """The answer of `devices_needed`: ``int(answer)`` is the number.

    Attributes:
        count: the fewest devices of those that were tried.
        tried: all numbers that were considered, the smallest first.
        step: the `TrainStep` that fits on them; its ``fitting`` is the table of that search.
    """

    count: int
    tried: tuple[Tried, ...]
    step: TrainStep = dataclasses.field(compare=False, repr=False)

    def __int__(self):
        return self.count

    __index__ = __int__

    @property
    def fitting(self) -> Fitting:
        """How the step was chosen."""
        return self.step.fitting

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain data."""
        return {"count": self.count, "tried": [dataclasses.asdict(one) for one in self.tried]}

    def _parts(self) -> Iterator[Part]:
        target = self.fitting.target
        count = f"{pluralize(self.count, 'device')} {'is' if self.count == 1 else 'are'}"
        yield Table(
            ("devices", "each", f"ms {time_error_text(time_error(target))}", "step"),
            [
                (
                    str(one.devices),
                    format_against(one.bytes, self.fitting.budget)
                    + ("" if one.compiled else " projected"),
                    "" if one.seconds is None else f"{one.seconds * 1e3:.4g}",
                    one.said,
                )
                for one in self.tried
            ],
            f"{count} needed, of {target.description}, with "
            f"{format_bytes(self.fitting.budget)} to use on each",
            left=(3,),
            wraps=True,
        )


def devices_needed(
    loss_fn: Callable,
    optimizer: optax.GradientTransformation,
    params: Any,
    batch: Any,
    *,
    target: str | Target | LocalDevice | None = None,
    most: int = 1024,  # chosen: as many as published runs of the table have
    compilations: int = 3,  # chosen: it bounds the time; most searches end sooner
    **options: Any,
) -> DevicesNeeded:
    """The fewest devices of a target that a training step fits on, with the step.

    For one device, then for more, `jaxmem.fit` is asked, which chooses the shape of their mesh:
    with the batch spread over all of them and, by ZeRO's stages, parameters, gradients and
    optimizer state too. Tried are the numbers that divide the batch: powers of two inside of a
    node of the target, and then whole nodes. Where jaxmem's own arithmetic says that even the
    smallest step is far too large, nothing is compiled.

    Args:
        loss_fn, optimizer, params, batch: as for `jaxmem.fit`; the batch is that of all devices.
        target: the accelerator, present or not; None: the attached one.
        most: devices, at most.
        compilations: how many at most for each number of devices.
        options: more of `jaxmem.fit`'s (``budget``, of each device; ``allow``, ``keep``,
            ``precision``, ``split``, ...), but for ``mesh`` and ``devices``.

    Raises:
        BudgetError: it fits on no number of devices that was tried; names the fewest bytes met.
        JaxmemError: what `jaxmem.fit` raises; or a mesh, which is what is searched.

    >>> import jax, jax.numpy as jnp, jaxmem, optax
    >>> def loss_fn(params, batch):
    ...     return jnp.mean((jnp.tanh(batch @ params["up"]) @ params["down"]) ** 2)
    >>> shapes = {"up": (1024, 8192), "down": (8192, 1024)}
    >>> params = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in shapes.items()}
    >>> batch = jax.ShapeDtypeStruct((512, 1024), "float32")
    >>> needed = jaxmem.devices_needed(
    ...     loss_fn, optax.adam(1e-3), params, batch, target="h100", budget="150MiB"
    ... )
    >>> int(needed)
    2
    """
    for name in sorted(options.keys() & _KNOWN):
        raise JaxmemError(
            f"jaxmem.devices_needed searches the number of devices and takes no {name}=; "
            f"jaxmem.fit(..., {name}={name}) is for what is known."
        )
    for name in options.keys() - _OPTIONS:
        raise JaxmemError(
            f"jaxmem.devices_needed has no option {name}=; it takes most=, compilations= and those "
            f"of jaxmem.fit: {', '.join(f'{one}=' for one in sorted(_OPTIONS))}."
        )
    check_count("jaxmem.devices_needed", "most", most)
    tried: list[Tried] = []
    with jaxprs.mesh_in_force(None):  # steps are traced on meshes of their own
        for count in _counts(batch, most, resolve(target)):
            workload = Workload(
                loss_fn, optimizer, params, batch, target=target, devices=count, **options
            )
            search = LeverSearch(workload)
            smallest = search.smallest()
            assert smallest is not None and smallest.projected is not None
            try:
                hopeless = smallest.projected > _HOPELESS * workload.budget
                size = smallest.projected
                if not hopeless and size > workload.budget:
                    size = search.bytes_of(smallest)
                if size > workload.budget:
                    said = f"too large: {smallest.name}; recompute {smallest.remat}"
                    tried.append(Tried(count, size, not hopeless, said))
                    continue
                tell(f"jaxmem: fit on {pluralize(count, 'device')}")
                step = search.run(compilations)
            except BudgetError as error:
                size = error.lowest or smallest.projected
                tried.append(Tried(count, size, error.lowest is not None, "nothing fits"))
            except CompileError as error:
                said = f"XLA could not compile it: {str(error).splitlines()[0]}"
                tried.append(Tried(count, smallest.projected, False, said))
            else:
                chosen = step.fitting.chosen
                said = f"{chosen.name}; recompute {chosen.remat}"
                tried.append(Tried(count, chosen.compiled or 0, True, said, chosen.seconds))
                return DevicesNeeded(count, tuple(tried), step)
    raise _too_small(tried, workload)


def _counts(batch: Any, most: int, target: Target | LocalDevice) -> list[int]:
    """Numbers of devices that divide the batch, as they are rented: in a node powers of two, else
    whole nodes."""
    known = target if isinstance(target, Target) else target.known
    node = known.links.node if known else NODE
    inside = [2**power for power in range(node.bit_length()) if 2**power < node]
    sizes = {(*np.shape(leaf), 1)[0] for leaf in jax.tree.leaves(batch)}
    return [
        count
        for count in (*inside, *range(node, most + 1, node))
        if count <= most and all(size % count == 0 for size in sizes) and _has(target, count)
    ]


def _has(target: Target | LocalDevice, count: int) -> bool:
    """Whether there is so much of a target: some families sell slices of a few sizes only."""
    try:
        return not isinstance(target, Target) or bool(target.of_count(count))
    except JaxmemError:
        return False


def _too_small(tried: list[Tried], workload: Workload) -> BudgetError:
    least = min(tried, key=lambda one: one.bytes)
    word = "compiled" if least.compiled else "projected"
    counts = ", ".join(str(one.devices) for one in tried)
    lines = [
        f"The step fits the budget of {format_bytes(workload.budget)} on no number of devices of "
        f"{workload.target.name} that divides the batch and was tried ({counts}). The fewest bytes "
        f"of each device were {format_against(least.bytes, workload.budget)} ({least.bytes} bytes "
        f"{word}), on {pluralize(least.devices, 'device')}.",
        *permissions(workload),
        "Or raise the budget or most=, or take a batch that more devices divide.",
    ]
    return BudgetError(" ".join(lines), least.bytes)
