"""What a value of the program may be, as far as the examples of the batch go."""

import dataclasses
import math
from typing import Any

Sizes = tuple[int, int]  # numbers of examples: of the batch, of the slice


@dataclasses.dataclass(frozen=True, slots=True)
class BatchInvariant:
    """Nothing of the batch: the same in both traces, times ``growth``.

    Attributes:
        growth: how many times larger it is for the batch than for the slice.
        value: where all its elements are one known number, that number in each trace. Only then
            may its shape depend on the size of the batch.
        uses_rng: it comes from the random key of the step, of which each slice gets its own.
        uses_model_state: it comes from a model state that one slice hands on, changed, to the next.
    """

    growth: float = 1.0
    value: tuple[Any, Any] | None = None
    uses_rng: bool = False
    uses_model_state: bool = False

    @property
    def is_zero(self) -> bool:
        return self.value is not None and not any(self.value)


@dataclasses.dataclass(frozen=True, slots=True)
class PerExample:
    """Parts of the examples, in order, along ``axis``, which has ``outer * examples * inner``
    indices: examples come once in each of ``outer`` blocks, ``inner`` indices at a time.

    ``inner`` is None where all indices of the axis have the same, as after a broadcast; then
    ``outer`` says nothing.
    """

    axis: int
    outer: int = 1
    inner: int | None = 1
    growth: float = 1.0


@dataclasses.dataclass(frozen=True, slots=True)
class FlatPerExample:
    """As `PerExample`, of all elements in row-major order, whatever the shapes: in a slice of one
    example the axis of the examples may be gone."""

    outer: int
    inner: int
    growth: float = 1.0


@dataclasses.dataclass(frozen=True, slots=True)
class ExampleIndex:
    """The number of each example, from 0, along ``axis``: good for picking its own part only."""

    axis: int


@dataclasses.dataclass(frozen=True, slots=True)
class GatherIndices:
    """Along the last axis the kinds of several indices for a gather, one of them `ExampleIndex`."""

    parts: tuple[Any, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class BatchReduction:
    """A sum over examples of what depends on one alone, times a number of this growth. With the
    growth of a mean something `BatchInvariant` may have been added."""

    growth: float = 1.0


@dataclasses.dataclass(frozen=True, slots=True)
class NotProved:
    """The reason, a clause that names the operation and its line."""

    why: str


Kind = (
    BatchInvariant
    | PerExample
    | FlatPerExample
    | ExampleIndex
    | GatherIndices
    | BatchReduction
    | NotProved
)

DIFFERENT_PROGRAM = NotProved("its program is another for a slice")


def is_same(kind: Kind) -> bool:
    """Whether a value is the same for the batch and for every slice of it."""
    return (
        isinstance(kind, BatchInvariant)
        and same_growth(kind.growth, 1)
        and not kind.uses_model_state
    )


def mean_growth(sizes: Sizes) -> float:
    """How many times larger ``1 / examples`` is for the batch."""
    return sizes[1] / sizes[0]


def sum_or_mean(kind: Kind, sizes: Sizes) -> str | None:
    """``"mean"`` or ``"sum"``, where a value is one over the examples."""
    if isinstance(kind, BatchReduction) and same_growth(kind.growth, mean_growth(sizes)):
        return "mean"
    return "sum" if isinstance(kind, BatchReduction) and same_growth(kind.growth, 1) else None


def same_growth(one: float, two: float) -> bool:
    """Growths are products of constants, in float32 mostly, each rounded by 6e-8: a hundred of them
    are within this."""
    return math.isclose(one, two, rel_tol=1e-5)


def first_line(error: Exception) -> str:
    """What an error says, short enough for a reason within a sentence."""
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
