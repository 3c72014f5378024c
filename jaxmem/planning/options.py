"""One way to run a scan, what it costs, and ways to run several."""

import dataclasses
import itertools
from collections.abc import Callable, Iterable
from typing import TypeVar

import numpy as np

from jaxmem.loops import IN_FLIGHT, Schedule, cheapest, on_host
from jaxmem.planning.rates import DEAR
from jaxmem.planning.regions import Head, Loop

# The bytes of schedules in a menu are so many times apart. Chosen: a plan asks for the schedule of
# the bytes that are left to it anyway (`LoopOption.with_room`).
_STEP = 1.2
# Ways to run several scans. Chosen: a plan fills what one of them leaves anyway, and each is
# planned like a program without scans.
_TOGETHER = 24


@dataclasses.dataclass(frozen=True, slots=True)
class LoopOption:
    """One way to run a scan: bytes of its residuals, on the device and on the host, and inside its
    derivative, the place where those peak, and what its backward pass runs again in all
    iterations, with its price (`Rates.price`); ``bodies`` are ways to run one iteration that have
    other schedules."""

    loop: Loop | None
    residuals: int
    inside: int
    place: tuple[int, ...]
    flops: int = 0
    moved: int = 0
    seconds: float = 0.0
    price: float = 0.0
    host: int = 0
    bodies: "tuple[Body, ...]" = ()

    @property
    def bytes(self) -> int:
        """Bytes on the device in its derivative."""
        return self.residuals + self.inside

    def with_room(self, room: int) -> "LoopOption | None":
        """The body and the schedule, or the two bodies, for the lowest price that take at most so
        many bytes."""
        found = [body.scheduled(room) for body in self.bodies if not body.host]
        found += [split(*pair, room) for pair in itertools.permutations(self.bodies, 2)]
        return min(filter(None, found), key=lambda option: option.price, default=None)


@dataclasses.dataclass(frozen=True, slots=True)
class Body:
    """A way to run the iterations of a scan: what one of them keeps (``step`` bytes, ``carried``
    among it: what it needs of the carry, which has ``state`` bytes) and has inside (``alone``
    says what it keeps and has inside where its derivative follows at once, in no loop of its own),
    what its derivative runs again, and what the iteration itself costs; ``host`` bytes of what it
    keeps wait in host memory, in no other count."""

    loop: Loop
    carried: tuple[int, ...]
    length: int
    state: int
    step: int
    inside: int
    alone: Callable[[], int]
    place: tuple[int, ...]
    again: tuple[float, float, float, float]  # FLOPs, bytes moved, seconds, price
    forward: tuple[float, float, float, float]
    host: int = 0

    @property
    def bytes(self) -> int:
        return self.length * self.step + self.inside

    def option(self, schedule: Schedule | None = None) -> LoopOption:
        """The iterations one after the other, or by a schedule."""
        runs, inside, residuals = 0, self.inside, self.length * self.step
        if schedule:
            runs = schedule.evaluations
            residuals = schedule.states * self.state
            inside += self.state  # the one that the loop is at
            # Those of the last steps are kept from the forward pass on: they are there while the
            # rest of the program runs. Of one step they are what its derivative has inside.
            residuals += schedule.tail * self.step
            if schedule.single and not schedule.host:
                inside = self.alone() + self.state - self.step
            else:
                inside += max(schedule.block - schedule.tail, 0) * self.step
            inside = max(inside, 0)
        flops, moved, seconds, price = (
            self.length * again + runs * forward
            for again, forward in zip(self.again, self.forward, strict=True)
        )
        loop, host = dataclasses.replace(self.loop, schedule=schedule), self.length * self.host
        return LoopOption(
            loop, residuals, inside, self.place, int(flops), int(moved), seconds, price, host
        )

    def scheduled(self, room: int) -> LoopOption | None:
        """By a schedule whose residuals, and what is inside, take at most so many bytes."""
        left = room - self.inside - self.state
        alone = room - self.alone() - self.state
        states = min(alone // max(self.state, 1), self.length)
        found = []
        schedule = cheapest(self.length, self.state, self.step, left)
        if schedule and schedule.blocks > 1:
            found.append(schedule)
        if states >= 1 and self.length > 1:
            found.append(Schedule(self.length, self.length, 1, states))
        fits = (option for option in map(self.option, found) if option.bytes <= room)
        return min(fits, key=lambda option: option.price, default=None)

    def on_host(self, room: int, host: float) -> LoopOption | None:
        """By a schedule whose states wait in host memory, copied at so many bytes a second."""
        left = room - self.inside - self.state
        schedule = on_host(self.length, self.state, self.step, left)
        if schedule is None:
            return None
        option = self.option(schedule)
        # There beside a block's steps, and back beside those and their derivatives. A second of
        # what is not hidden counts as much as one of the steps that it spares.
        link, forward = self.state / host, schedule.block * self.forward[2]
        compute = (forward, 3 * forward + schedule.block * self.again[2])
        exposed = schedule.states * sum(max(link - time, 0.0) for time in compute)
        counts = self.forward[3] / self.forward[2] if self.forward[2] else DEAR
        return dataclasses.replace(
            option,
            residuals=schedule.tail * self.step,
            inside=option.inside + IN_FLIGHT * self.state,
            seconds=option.seconds + exposed,
            price=option.price + counts * exposed,
            host=schedule.states * self.state,
        )

    def menu(self, host: float) -> list[LoopOption]:
        """Schedules from the most bytes to the least; with a link to the host, of so many bytes a
        second, those with states there too."""
        found: list[LoopOption] = []
        for scheduled in (self.scheduled, *[lambda room: self.on_host(room, host)] * bool(host)):
            room = float(self.bytes)
            while option := scheduled(int(room)):
                found.append(option)
                room = min(room / _STEP, option.bytes - 1)
        return found


def split(head: Body, rest: Body, room: int) -> LoopOption | None:
    """As many of the last iterations as there is room for by a body that keeps more than that of
    the first ones and runs less again. Of the last ones all is freed before the first ones are
    differentiated. At least two of each: XLA makes no loop of one."""
    more, length = rest.step - head.step, rest.length
    if more <= 0 or rest.again[3] >= head.again[3]:
        return None
    last = int(min((room - length * head.step - rest.inside) // more, length - 2))
    first = length - last
    residuals = first * head.step + last * rest.step
    inside = max(rest.inside, head.inside - last * rest.step)
    if last < 2 or residuals + inside > room:
        return None
    flops, moved, seconds, price = (
        first * one + last * other for one, other in zip(head.again, rest.again, strict=True)
    )
    loop = dataclasses.replace(rest.loop, head=Head(first, head.loop))
    place = rest.place if inside == rest.inside else head.place
    host = first * head.host + last * rest.host
    return LoopOption(loop, residuals, inside, place, int(flops), int(moved), seconds, price, host)


def together(menus: list[list[LoopOption]]) -> list[list[LoopOption]]:
    """Ways to run all scans, from the lowest price to the fewest bytes: one menu as it is; of
    several the next entry always of that where a byte less costs the least."""
    if len(menus) == 1:
        return [[option] for option in menus[0]]
    steps = []
    for number, menu in enumerate(menus):
        hull = lower_hull(menu, lambda option: (option.bytes, option.price))
        for before, after in itertools.pairwise(hull):
            slope = (after.price - before.price) / (before.bytes - after.bytes)
            steps.append((slope, number, after))
    found = [[menu[0] for menu in menus]]
    for _, number, option in sorted(steps, key=lambda step: step[:2]):
        found.append([*found[-1][:number], option, *found[-1][number + 1 :]])
    if len(found) > _TOGETHER:
        found = [found[int(at)] for at in np.linspace(0, len(found) - 1, _TOGETHER)]
    return found


Way = TypeVar("Way")


def lower_hull(ways: Iterable[Way], cost: Callable[[Way], tuple[int, float]]) -> list[Way]:
    """Of ways by their bytes and prices, from the first one on those with fewer and fewer bytes
    that no two others together better."""
    hull: list[Way] = []

    def slope(before: Way, after: Way) -> float:
        (more, low), (less, high) = cost(before), cost(after)
        return (high - low) / (more - less)

    for one in ways:
        if hull and cost(one)[0] >= cost(hull[-1])[0]:
            continue
        while len(hull) > 1 and slope(hull[-2], one) <= slope(hull[-2], hull[-1]):
            hull.pop()
        hull.append(one)
    return hull
