"""Axes of a mesh that a model itself names: tensor, expert and sequence parallelism."""

import contextlib
import math
import numbers
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from jaxmem.ground.checks import shown
from jaxmem.ground.errors import JaxmemError
from jaxmem.ground.words import pluralize

# By the name of an axis of the mesh: of the path of an array and the array, which of its axes is
# cut along it; None: it is not.
Cut = Callable[[str, Any], "int | None"]
Cuts = tuple[tuple[str, Cut], ...]
_BATCH = "batch"  # what the paths of a batch's arrays begin with


class UndividedError(JaxmemError):
    """An array that devices do not divide.

    Attributes:
        what: the array and the devices, in a sentence; what to do comes after it.
    """

    def __init__(self, what: str, advice: str):
        super().__init__(f"{what} {advice}")
        self.what = what


def cuts_of(split: Mapping[str, Cut] | None) -> Cuts:
    """What ``split=`` says, checked.

    Raises:
        JaxmemError: it is no dict of functions by names.
    """
    if split is None:
        return ()
    if not isinstance(split, Mapping) or not all(map(callable, split.values())):
        raise JaxmemError(
            "split= takes a dict: for each axis of the mesh that the model names a function of the "
            'path of an array and the array, as in {"model": lambda path, leaf: 2 if "up" in path '
            f"else None}}, the axis of the array that is cut along it. Got {shown(split)}."
        )
    for name in split:
        if not isinstance(name, str) or not name:
            raise JaxmemError(
                f"split= takes names of axes of the mesh, as text; got {shown(name)} as one."
            )
    return tuple(split.items())


def cut_axes(
    cuts: Cuts, counts: Mapping[str, int], path: str, leaf: Any, spread: tuple[str, ...] = ()
) -> list[tuple[str, ...]]:
    """For each axis of an array the axes of the mesh, of more than one device, that the model cuts
    it along: none of those that it is ``spread`` along anyway.

    Raises:
        JaxmemError: there is no such axis, or its length is no multiple.
    """
    found: list[tuple[str, ...]] = [()] * leaf.ndim
    for name, cut in cuts:
        at = cut_axis(name, cut, path, leaf)
        if at is None or counts[name] == 1:
            continue
        if name in spread:
            raise JaxmemError(
                f"split[{name!r}] cuts {path} along {name!r}, and jaxmem.shard spreads parameters "
                "along that axis too. Pass axis=, an axis of the mesh along which the model cuts "
                f"no parameter (the mesh has {', '.join(map(repr, counts))}), or axis=() for none."
            )
        ways = counts[name]
        for other in found[at]:
            ways *= counts[other]
        if leaf.shape[at] % ways:
            raise UndividedError(
                f"split[{name!r}] cuts axis {at} of {path}, of shape {list(leaf.shape)}, into "
                f"{ways} parts, and {leaf.shape[at]} is no multiple of {ways}.",
                "Pad it, or return another axis, or None.",
            )
        found[at] = (*found[at], name)
    return found


def cut_axis(name: str, cut: Cut, path: str, leaf: Any) -> int | None:
    """Which axis of an array the model cuts along an axis of the mesh; None: none. Scalars and
    empty arrays are not asked about.

    Raises:
        JaxmemError: what the function returns is no axis of the array.
    """
    if not leaf.ndim or not leaf.size:
        return None
    with _asked(f"split[{name!r}]", path, leaf):
        at = cut(path, leaf)
    if at is None:
        return None
    number = isinstance(at, numbers.Integral) and not isinstance(at, bool)
    if not number or not -leaf.ndim <= int(at) < leaf.ndim:
        raise JaxmemError(
            f"split[{name!r}] returned {shown(at)} for {path} of shape {list(leaf.shape)}: it is "
            f"to return the axis that is cut, an int of {-leaf.ndim} to {leaf.ndim - 1} here, or "
            "None."
        )
    return int(at)


def is_kept(keep: Callable[[str, Any], bool], path: str, leaf: Any) -> bool:
    """Whether every device keeps a copy of an array."""
    if not leaf.ndim or not leaf.size:
        return True
    with _asked("keep", path, leaf):
        found = keep(path, leaf)
    if not isinstance(found, bool | np.bool_):
        raise JaxmemError(
            "jaxmem.shard takes keep=, a function that says True (every device keeps a copy) or "
            f"False of an array; for {path} it returned {shown(found)}."
        )
    return bool(found)


@contextlib.contextmanager
def _asked(name: str, path: str, leaf: Any) -> Iterator[None]:
    """Adds to what a function of the user's raises, which it is and what it was asked about."""
    try:
        yield
    except Exception as error:
        error.add_note(f"jaxmem: raised by {name} for {path}, {shown(leaf)}.")
        raise


def batch_specs(cuts: Cuts, counts: Mapping[str, int], rows: tuple[str, ...], batch: Any) -> Any:
    """The spec of each array of a batch: its first axis along ``rows``, others as the model says.

    Raises:
        JaxmemError: a first axis that the devices do not divide.
    """
    devices = math.prod(counts[name] for name in rows)

    def spec(path: str, leaf: Any) -> PartitionSpec:
        path = f"{_BATCH}{path}"
        if not leaf.ndim or leaf.shape[0] % devices:
            raise UndividedError(
                f"{path} has shape {list(leaf.shape)}, and its first axis is to be spread over "
                f"{pluralize(devices, 'device')}.",
                "Make it a multiple.",
            )
        first, *others = cut_axes(cuts, counts, path, leaf)
        return spec_of([(*rows, *first), *others])

    return specs_of(spec, batch)


def check_cuts(cuts: Cuts, batch: Any) -> None:
    """Raises `JaxmemError` where the functions of ``split`` return no axis for an array of a
    batch."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        for name, cut in cuts:
            cut_axis(name, cut, f"{_BATCH}{jax.tree_util.keystr(path)}", leaf)


def specs_of(spec: Callable[[str, Any], PartitionSpec], tree: Any) -> Any:
    """The spec of each leaf, by its path and itself."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: spec(jax.tree_util.keystr(path), leaf), tree
    )


def names_of(part: Any) -> tuple[str, ...]:
    """The axes of a mesh that an axis of an array is cut along, as a `PartitionSpec` has them."""
    if part is None:
        return ()
    return part if isinstance(part, tuple) else (part,)


def others(part: Any, axes: tuple[str, ...]) -> tuple[str, ...]:
    """The axes of a part that are none of these."""
    return tuple(name for name in names_of(part) if name not in axes)


def spec_of(parts: Sequence[tuple[str, ...]]) -> PartitionSpec:
    """The spec of an array whose axes are cut along these."""
    entries = [part[0] if len(part) == 1 else part or None for part in parts]
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)
