"""How far a search is, and the time left."""

import statistics
import time
from collections.abc import Callable


class Bar:
    """How far a search is.

    The time left comes from what was compiled in this search; before that from what `expect` was
    told, which the cache remembers of other compilations.

    Attributes:
        message: what goes on.
        most: compilations at most; None: it is one piece of work.
        done: how many there were.
    """

    def __init__(self, message: str, most: int | None = None, done: int = 0):
        self.message, self.most, self.done = message, most, done
        self.running, self.began = 0, time.monotonic()
        self.redraw: Callable[[], None] = lambda: None
        self.compiles = False  # whether what runs is not in the cache
        self._remembered: float | None = None
        self._compiled: list[float] = []  # seconds of those that were compiled here
        self._found: list[float] = []  # and of those that the cache had

    def show(self, said: str) -> None:
        """Says what goes on."""
        self.message = said
        self.redraw()

    def begin(self, count: int = 1) -> None:
        """So many compilations begin together."""
        self.running, self.began, self.compiles = count, time.monotonic(), False

    def finish(self) -> None:
        """One more of them is there."""
        took = time.monotonic() - self.began
        (self._compiled if self.compiles else self._found).append(took)
        self.done, self.running = self.done + 1, self.running - 1

    def expect(self, seconds: float | None) -> None:
        """The compiler begins, and is expected to take so long."""
        self.compiles = True
        if seconds is not None:
            self._remembered = seconds

    @property
    def remaining_seconds(self) -> float | None:
        """Seconds until as many are compiled as may be; None: nothing is known. Those that began
        together end together."""
        each = self._each
        if each is None:
            return None
        running = each - (time.monotonic() - self.began) if self.running else 0.0
        rest = (self.most or 1) - self.done - self.running
        return max(running, 0.0) + max(rest, 0) * each

    @property
    def _each(self) -> float | None:
        """Seconds of one compilation."""
        if self._compiled:
            return statistics.mean(self._compiled)
        if self._remembered is not None or self.compiles:
            return self._remembered
        return statistics.mean(self._found) if self._found else None
