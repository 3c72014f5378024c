"""When the arrays of zeros are there that loops fill (`jaxmem.program.loop_zeros`)."""

import itertools
from collections import Counter, defaultdict
from collections.abc import Sequence

from jaxmem.planning.events import Event
from jaxmem.program import Program, zeros_of_loops


def with_zeros(program: Program, events: Sequence[Event], live: list[int]) -> list[int]:
    """The bytes at each event, and those of zeros that loops which have run already, or are yet to
    run, share with one that is running or is yet to run."""
    zeros = program.cache.get("zeros of loops")
    if zeros is None:
        zeros = program.cache["zeros of loops"] = zeros_of_loops(program)
    if not zeros:
        return live
    # The last event of a kernel in a run is the loop: what comes before makes its cotangent.
    loops = {
        (event.kernel, event.run, event.backward): index
        for index, event in enumerate(events)
        if event.kernel in zeros and not event.copies
    }
    sharing: defaultdict[tuple[str, int], list[tuple[int, int]]] = defaultdict(list)
    for (kernel, _, backward), index in loops.items():
        filled = zeros[kernel].backward if backward else zeros[kernel].forward
        seen = Counter[str]()
        for kind, size in filled:
            sharing[kind, seen[kind]].append((index, size))
            seen[kind] += 1
    changes = [0] * (len(live) + 1)
    for found in sharing.values():
        (first, _), *others = sorted(found)
        # As JAX derives it all copies are written at once; else the zeros alone stay.
        for index, size in others if program.as_jax_derives else others[-1:]:
            changes[first] += size
            changes[index] -= size
    return [a + b for a, b in zip(live, itertools.accumulate(changes), strict=False)]
