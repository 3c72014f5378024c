"""Where a plan recomputes: regions, and loops with regions in their bodies."""

import dataclasses

from jaxmem.loops import Schedule


@dataclasses.dataclass(frozen=True, slots=True)
class Region:
    """Kernels ``start`` to ``stop - 1`` under one `jax.checkpoint`, recomputed in the backward
    pass but for the values ``saved``; ``regions`` are nested in it."""

    start: int
    stop: int
    saved: tuple[int, ...] = ()
    regions: "tuple[Region, ...]" = ()


def place_of(regions: tuple[Region, ...], kernel: int) -> tuple[int, ...]:
    """A kernel's number, and the first and the last of the innermost region that it is in."""
    for region in regions:
        if region.start <= kernel < region.stop:
            inside = place_of(region.regions, kernel)
            return inside if len(inside) > 1 else (kernel, region.start, region.stop - 1)
    return (kernel,)


@dataclasses.dataclass(frozen=True, slots=True)
class Loop:
    """A `scan`, whose body is recomputed in the backward pass but for the values ``saved`` of it;
    ``regions`` are nested in the body. The values ``offloaded`` (inputs of the body among them)
    wait for the backward pass in host memory.

    ``kernel`` is its number in the program; values and ``regions`` are by the numbers of the body's
    own program. With a ``schedule`` states are kept for some iterations alone, and the others run
    again. ``whole`` is a body that is not recomputed: all that its derivative reads is saved.
    ``loops`` are the scans of the body that are not left as they are.
    """

    kernel: int
    saved: tuple[int, ...] = ()
    regions: tuple[Region, ...] = ()
    offloaded: tuple[int, ...] = ()
    schedule: Schedule | None = None
    whole: bool = False
    loops: "tuple[Loop, ...]" = ()
