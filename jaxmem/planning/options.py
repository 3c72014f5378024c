"""One way to run a scan, what it costs, and ways to run several."""

import dataclasses
import itertools
from collections.abc import Callable, Iterable
from typing import TypeVar

import numpy as np

from jaxmem.loops import IN_FLIGHT, Schedule, cheapest, on_host
from jaxmem.planning.rates import waiting_weight
from jaxmem.planning.regions import LeadingIterations, Loop

# The bytes of schedules in a menu are so many times apart. Chosen: a plan asks for the schedule of
# the bytes that are left to it anyway (`LoopOption.cheapest_for_bytes`).
_SCHEDULE_RATIO = 1.2
# Ways to run several scans. Chosen: a plan fills what one of them leaves anyway, and each is
# planned like a program without scans.
_COMBINATIONS = 24


@dataclasses.dataclass(frozen=True, slots=True)
class LoopOption:
    """One way to run a scan: bytes of its residuals, on the device and on the host, and inside its
    derivative, the place where those peak, and what its backward pass runs again in all
    iterations, with its price (`Rates.price`); ``bodies`` are ways to run one iteration that have
    other schedules."""

    loop: Loop | None
    residuals: int
    inside: int
    peak_location: tuple[int, ...]
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

    def cheapest_for_bytes(self, room: int) -> "LoopOption | None":
        """The body and the schedule, or the two bodies, for the lowest price that take at most so
        many bytes."""
        found = [body.scheduled(room) for body in self.bodies if not body.host]
        found += [split_iterations(*pair, room) for pair in itertools.permutations(self.bodies, 2)]
        return min(filter(None, found), key=lambda option: option.price, default=None)


@dataclasses.dataclass(frozen=True, slots=True)
class Body:
    """A way to run the iterations of a scan: what one of them keeps (``residual_bytes`` bytes,
    ``carried`` among it: what it needs of the carry, which has ``state`` bytes) and has inside
    (``peak_without_loop`` says what it keeps and has inside where its derivative follows at once,
    in no loop of its own), what its derivative runs again, and what the iteration itself costs;
    ``host`` bytes of what it keeps wait in host memory, in no other count."""

    loop: Loop
    carried: tuple[int, ...]
    length: int
    state: int
    residual_bytes: int
    inside: int
    peak_without_loop: Callable[[], int]
    peak_location: tuple[int, ...]
    recompute_cost: tuple[float, float, float, float]  # FLOPs, bytes moved, seconds, price
    forward_cost: tuple[float, float, float, float]
    host: int = 0

    @property
    def bytes(self) -> int:
        return self.length * self.residual_bytes + self.inside

    @property
    def waiting(self) -> float:
        """What a second of waiting for copies counts: as one of an iteration."""
        return waiting_weight(*self.forward_cost[2:])

    def option(self, schedule: Schedule | None = None) -> LoopOption:
        """The iterations one after the other, or by a schedule."""
        runs, inside, residuals = 0, self.inside, self.length * self.residual_bytes
        if schedule:
            runs = schedule.evaluations
            residuals = schedule.states * self.state
            inside += self.state  # the one that the loop is at
            # Those of the last steps are kept from the forward pass on: they are there while the
            # rest of the program runs. Of one step they are what its derivative has inside.
            residuals += schedule.tail * self.residual_bytes
            if schedule.single and not schedule.host:
                inside = self.peak_without_loop() + self.state - self.residual_bytes
            else:
                inside += max(schedule.block - schedule.tail, 0) * self.residual_bytes
            inside = max(inside, 0)
        flops, moved, seconds, price = (
            self.length * again + runs * forward
            for again, forward in zip(self.recompute_cost, self.forward_cost, strict=True)
        )
        loop, host = dataclasses.replace(self.loop, schedule=schedule), self.length * self.host
        return LoopOption(
            loop,
            residuals,
            inside,
            self.peak_location,
            int(flops),
            int(moved),
            seconds,
            price,
            host,
        )

    def scheduled(self, room: int) -> LoopOption | None:
        """By a schedule whose residuals, and what is inside, take at most so many bytes."""
        left = room - self.inside - self.state
        alone = room - self.peak_without_loop() - self.state
        states = min(alone // max(self.state, 1), self.length)
        found = []
        schedule = cheapest(self.length, self.state, self.residual_bytes, left)
        if schedule and schedule.blocks > 1:
            found.append(schedule)
        if states >= 1 and self.length > 1:
            found.append(Schedule(self.length, self.length, 1, states))
        fits = (option for option in map(self.option, found) if option.bytes <= room)
        return min(fits, key=lambda option: option.price, default=None)

    def on_host(self, room: int, host: float) -> LoopOption | None:
        """By a schedule whose states wait in host memory, copied at so many bytes a second."""
        left = room - self.inside - self.state
        schedule = on_host(self.length, self.state, self.residual_bytes, left)
        if schedule is None:
            return None
        option = self.option(schedule)
        # There beside a block's steps, and back beside those and their derivatives.
        link, forward = self.state / host, schedule.block * self.forward_cost[2]
        compute = (forward, 3 * forward + schedule.block * self.recompute_cost[2])
        exposed = schedule.states * sum(max(link - time, 0.0) for time in compute)
        return dataclasses.replace(
            option,
            residuals=schedule.tail * self.residual_bytes,
            inside=option.inside + IN_FLIGHT * self.state,
            seconds=option.seconds + exposed,
            price=option.price + self.waiting * exposed,
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
                room = min(room / _SCHEDULE_RATIO, option.bytes - 1)
        return found


def split_iterations(head: Body, rest: Body, room: int) -> LoopOption | None:
    """As many of the last iterations as there is room for by a body that keeps more than that of
    the first ones and runs less again. Of the last ones all is freed before the first ones are
    differentiated. At least two of each: XLA makes no loop of one."""
    more, length = rest.residual_bytes - head.residual_bytes, rest.length
    if more <= 0 or rest.recompute_cost[3] >= head.recompute_cost[3]:
        return None
    last = int(min((room - length * head.residual_bytes - rest.inside) // more, length - 2))
    first = length - last
    residuals = first * head.residual_bytes + last * rest.residual_bytes
    inside = max(rest.inside, head.inside - last * rest.residual_bytes)
    if last < 2 or residuals + inside > room:
        return None
    flops, moved, seconds, price = (
        first * one + last * other
        for one, other in zip(head.recompute_cost, rest.recompute_cost, strict=True)
    )
    loop = dataclasses.replace(rest.loop, head=LeadingIterations(first, head.loop))
    location = rest.peak_location if inside == rest.inside else head.peak_location
    host = first * head.host + last * rest.host
    return LoopOption(
        loop, residuals, inside, location, int(flops), int(moved), seconds, price, host
    )


def combine_menus(menus: list[list[LoopOption]]) -> list[list[LoopOption]]:
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
    if len(found) > _COMBINATIONS:
        found = [found[int(at)] for at in np.linspace(0, len(found) - 1, _COMBINATIONS)]
    return found


Option = TypeVar("Option")


def lower_hull(
    options: Iterable[Option], cost: Callable[[Option], tuple[int, float]]
) -> list[Option]:
    """Of ways by their bytes and prices, from the first one on those with fewer and fewer bytes
    that no two others together better."""
    hull: list[Option] = []

    def slope(before: Option, after: Option) -> float:
        (more, low), (less, high) = cost(before), cost(after)
        return (high - low) / (more - less)

    for one in options:
        if hull and cost(one)[0] >= cost(hull[-1])[0]:
            continue
        while len(hull) > 1 and slope(hull[-2], one) <= slope(hull[-2], hull[-1]):
            hull.pop()
        hull.append(one)
    return hull
