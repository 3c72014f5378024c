"""The families of targets, and targets by name."""

import difflib
import functools
import os

from jaxmem.ground.errors import JaxmemError
from jaxmem.ground.words import pluralize
from jaxmem.targets.accelerator import LocalDevice, Target
from jaxmem.targets.calibrations import calibrated
from jaxmem.targets.cuda.family import Cuda
from jaxmem.targets.family import Family
from jaxmem.targets.tpu.family import Tpu

FAMILIES: dict[str, Family] = {family.name: family for family in (Cuda(), Tpu())}


def family_of(chosen: Target | None) -> Family:
    """The family of a target; None: of the first one."""
    return FAMILIES[chosen.family] if chosen else next(iter(FAMILIES.values()))


@functools.cache
def computed_by(name: str) -> str:
    """What a custom call of a compiled program computes (`Family.custom_calls`); empty: not known.

    >>> computed_by("__cublas$gemm")
    'dot'
    """
    known = (item for family in FAMILIES.values() for item in family.custom_calls.items())
    return next((what for begins, what in known if name.startswith(begins)), "")


def example_target() -> Target:
    """The target whose rates stand for those of none."""
    return known_targets()[family_of(None).example]


def example() -> str:
    """A target as a message names it."""
    return f"target={family_of(None).example!r}"


@functools.cache
def known_targets() -> dict[str, Target]:
    """The targets that jaxmem knows, by name, with their makers' figures.

    >>> "rtx-2080-ti" in known_targets()
    True
    """
    return {name: one for family in FAMILIES.values() for name, one in family.targets().items()}


def target(
    name: str, *, count: int | None = None, topology: str | None = None
) -> Target | LocalDevice:
    """The accelerator of that name, to plan and compile for.

    Args:
        name: one of `known_targets`, in any case (``"H100"``), or ``"local"`` for the attached
            device.
        count: how many of them run the step together (SPMD over a mesh): 1 if nothing is said.
        topology: of TPUs the shape of the slice in chips, as in ``"4x8"``, instead of a count.

    Raises:
        JaxmemError: the name is not known (the message lists the known ones), or there is no such
            slice.

    >>> import jaxmem
    >>> print(jaxmem.target("rtx-2080-ti"))
    rtx-2080-ti: NVIDIA GeForce RTX 2080 Ti, 10.76 GiB (10.26 GiB usable)
    """
    if name == "local":
        return _local(1 if count is None else count)
    known = known_targets()
    if isinstance(name, str) and name not in known and name.lower() in known:
        name = name.lower()
    if not isinstance(name, str) or name not in known:
        asked = str(name).lower()
        sizes = [one for one in known if one.startswith(f"{asked}-")]
        close = sizes or difflib.get_close_matches(asked, known, n=1)
        hint = f" Did you mean {' or '.join(map(repr, close))}?" if close else ""
        raise JaxmemError(
            f"There is no target named {name!r}.{hint} The known ones are "
            f"{', '.join(known)}, and 'local' for the attached device. For another one, "
            "dataclasses.replace() the figures of the nearest one."
        )
    if topology is None:
        return calibrated(known[name]).of_count(1 if count is None else count)
    found = calibrated(known[name]).of_topology(topology)
    if count not in (None, found.count):
        raise JaxmemError(
            f"target({name!r}, topology={topology!r}) has {pluralize(found.count, 'device')}, and "
            f"count is {count!r}. Pass one of the two."
        )
    return found


def resolve(spec: "str | Target | LocalDevice | None") -> Target | LocalDevice:
    """A target from what a ``target=`` argument may be; None is the attached device."""
    if isinstance(spec, Target | LocalDevice):
        return spec
    if spec is None or isinstance(spec, str):
        return target(spec or "local")
    raise JaxmemError(
        f"target= takes a name such as {family_of(None).example!r}, 'local', or a jaxmem.Target; "
        f"got {spec!r} of type {type(spec).__name__}."
    )


def _local(count: int) -> LocalDevice:
    import jax

    devices = jax.local_devices()
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= len(devices):
        raise JaxmemError(
            f"target('local', count={count!r}) takes 1 or more, up to the "
            f"{pluralize(len(devices), 'device')} attached. Name a known target to compile for "
            "ones that are not there."
        )
    device = devices[0]
    known = None
    if device.platform == "cpu":
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    else:
        kinds = {one.device_kind: one for one in known_targets().values()}
        known = kinds.get(device.device_kind)
        known = known and calibrated(known)
        # Without a limit of its own (the platform allocator has none) all of it is there.
        limit = (device.memory_stats() or {}).get("bytes_limit")
        memory = limit or (known.usable_bytes if known else 0)
    return LocalDevice(device.platform, device.device_kind, memory, known, count=count)
