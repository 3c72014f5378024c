"""Device bytes along a step."""

import dataclasses
from collections.abc import Callable, Sequence

# At most. Chosen: a page is no wider; with half of them its curve is coarser, twice cannot be seen.
_POINTS = 400


@dataclasses.dataclass(frozen=True, slots=True)
class PlanTimeline:
    """Device bytes along a step, projected or compiled.

    Attributes:
        live: bytes of the whole of ``value_and_grad(fun)``, what is reserved included, in the order
            in which the step runs; of each stretch of a long one the most.
        backward: the place in it where the backward pass begins; 0: not known.
    """

    live: tuple[int, ...] = ()
    backward: int = 0

    @classmethod
    def of(cls, alive: Sequence[int], first: int, total: Callable[[int], int]) -> "PlanTimeline":
        """From bytes at every event; ``total`` adds what a plan does not count."""
        step = max(1, -(-len(alive) // _POINTS))
        live = (max(alive[at : at + step]) for at in range(0, len(alive), step))
        return cls(tuple(map(total, live)), first // step)


UNKNOWN = PlanTimeline()
