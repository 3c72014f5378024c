"""How often a long loop runs its steps again, within so many states that are kept.

Griewank and Walther, "Algorithm 799: revolve" (ACM TOMS, 2000): with ``c`` states kept, the first
among them, ``C(c + r, c)`` steps can be reversed so that none runs more than ``r`` times before it
is differentiated, and no schedule does better. Here what is reversed at once is a block of steps,
whose residuals are in memory together.
"""

import dataclasses
import math

import numpy as np

# Numbers of states that are tried, the larger ones some percent apart. Chosen: the fewest
# evaluations are missed by less than 2 % (tests/test_schedules.py).
_TRIED = 400
# States on their way to host memory or from it, beside the one that the loop is at. Derived: one is
# copied while a block of steps runs, and the next one waits for its turn.
IN_FLIGHT = 2
_MOST = 2**30  # binomial coefficients above are as good as this one: they are kept as int32


def reachable(states: int, repeats: int) -> int:
    """How many blocks can be reversed with so many states kept, none run more than ``repeats``
    times: ``C(states + repeats, states)``."""
    return math.comb(states + repeats, states) if repeats >= 0 else 0


def repeats(blocks: int, states: int) -> int:
    """How often the block that is run most often is run before it is differentiated."""
    if states == 1:
        return blocks - 1
    found = 0
    while reachable(states, found) < blocks:
        found += 1
    return found


def advances(blocks: int, states: int) -> int:
    """The fewest runs of blocks, those of the first pass among them, that reversing ``blocks``
    takes: the last one is differentiated where it is first run.

    >>> advances(10, 1), advances(10, 3), advances(10, 10)
    (45, 15, 9)
    """
    most = repeats(blocks, states)
    return most * blocks - reachable(states + 1, most - 1)


def table(states: int, repeats: int) -> np.ndarray:
    """`reachable` by states up to so many, and repeats below so many, as int32."""
    rows = [
        [min(reachable(states, count), _MOST) for count in range(repeats)]
        for states in range(states + 1)
    ]
    return np.asarray(rows, np.int32)


@dataclasses.dataclass(frozen=True, slots=True)
class Schedule:
    """A loop of ``length`` steps in ``blocks``: all but the last are of ``block`` steps. So many
    ``states`` are kept, the first among them; the residuals of the last block are kept from the
    forward pass, those of the others are made again, a block at a time. With ``host`` the state
    before each of the others is kept, in host memory."""

    length: int
    blocks: int
    block: int
    states: int
    host: bool = False

    @property
    def tail(self) -> int:
        """The steps of the last block."""
        return self.length - (self.blocks - 1) * self.block

    @property
    def single(self) -> bool:
        """Whether each block is one step."""
        return self.block == self.tail == 1

    @property
    def evaluations(self) -> int:
        """How many steps are run again."""
        return self.block * advances(self.blocks, self.states)

    @property
    def repeats(self) -> int:
        """How often the step that is run again most often is."""
        return repeats(self.blocks, self.states)

    def bytes(self, state: int, step: int) -> int:
        """Bytes of the states, and of the residuals of the steps of the largest block."""
        return self.states * state + max(self.tail, self.block) * step

    @property
    def reachable(self) -> np.ndarray:
        """`reachable` as a table of int32, by states and repeats; what is larger than any loop is
        `_MOST`."""
        return table(self.states, self.repeats + 2 if self.states > 1 else 1)


def cheapest(length: int, state: int, step: int, room: int) -> Schedule | None:
    """The schedule with the fewest evaluations that takes at most ``room`` bytes, where a state has
    ``state`` of them and the residuals of a step ``step``; None: nothing does.

    >>> cheapest(7343, 2**20, 2**20, 34 * 2**20)
    Schedule(length=7343, blocks=612, block=12, states=22, host=False)
    """
    state, step = max(state, 1), max(step, 1)
    if length * step + state <= room:
        return Schedule(length, 1, length, 1)
    most = min((room - step) // state, length)
    if most < 1:
        return None
    # For each number of states: the longest last block that there is room for, and as few others,
    # or some more, whose lengths may divide what is left better.
    states = np.unique(np.geomspace(1, most, _TRIED).round().astype(int))
    left = length - np.minimum((room - states * state) // step, length - 1)
    fewest = -(-left // (length - left))
    largest = -(-left // fewest)
    counts = [fewest + more for more in range(4)]
    counts += [-(-left // np.maximum(largest - less, 1)) for less in (1, 2)]
    others = np.minimum(counts, left)
    block = -(-left // others)
    others = -(-left // block)
    cost = block * _advances(others.ravel() + 1, np.tile(states, len(counts))).reshape(block.shape)
    row, column = np.unravel_index(np.argmin(cost), cost.shape)
    blocks = int(others[row, column]) + 1
    states_kept = min(int(states[column]), blocks - 1)  # the last block is where it is
    return Schedule(length, blocks, int(block[row, column]), states_kept)


def on_host(length: int, state: int, step: int, room: int) -> Schedule | None:
    """The schedule with the fewest evaluations, all of whose states wait in host memory, and that
    takes at most ``room`` bytes on the device, for residuals and for states on their way; None:
    there is no room for those, or no need of a schedule.

    >>> on_host(7343, 2**25, 2**24, 2**31)
    Schedule(length=7343, blocks=60, block=123, states=59, host=True)
    """
    tail = (room - IN_FLIGHT * state) // max(step, 1)
    if not 1 <= tail < length:
        return None
    others = -(-(length - tail) // tail)
    block = -(-(length - tail) // others)
    others = -(-(length - tail) // block)
    return Schedule(length, others + 1, block, others, True)


def _advances(blocks: np.ndarray, states: np.ndarray) -> np.ndarray:
    """`advances` of arrays, in float64: sums up to 2**53 are exact."""
    blocks, states = blocks.astype(float), np.minimum(states, blocks).astype(float)
    result = blocks * (blocks - 1) / 2  # with one state
    waiting = np.flatnonzero(states > 1)
    counts = np.ones(len(waiting))  # C(states + count, states)
    count = 0
    while len(waiting):
        done = counts >= blocks[waiting]
        at = waiting[done]
        # C(states + count, states + 1), by C(n, k + 1) = C(n, k) (n - k) / (k + 1)
        below = counts[done] * count / (states[at] + 1)
        result[at] = count * blocks[at] - below
        waiting, counts = waiting[~done], counts[~done]
        count += 1
        counts = counts * (states[waiting] + count) / count
    return result
