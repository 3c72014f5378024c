"""Axes of a mesh that a model itself names: tensor, expert and sequence parallelism."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from jaxmem.ground.checks import shown
from jaxmem.ground.errors import JaxmemError

# By the name of an axis of the mesh: of the path of an array and the array, which of its axes is
# cut along it; None: it is not.
Cut = Callable[[str, Any], "int | None"]
Cuts = tuple[tuple[str, Cut], ...]
_BATCH = "batch"  # what the paths of a batch's arrays begin with


def cuts_of(split: Mapping[str, Cut] | None) -> Cuts:
    """What ``split=`` says, checked.

    Raises:
        JaxmemError: it is no dict of functions.
    """
    if split is None:
        return ()
    if not isinstance(split, Mapping) or not all(map(callable, split.values())):
        raise JaxmemError(
            "split= takes a dict: for each axis of the mesh that the model names a function of the "
            'path of an array and the array, as in {"model": lambda path, leaf: 2 if "up" in path '
            f"else None}}, the axis of the array that is cut along it. Got {shown(split)}."
        )
    return tuple(split.items())


def cut_axes(cuts: Cuts, counts: Mapping[str, int], path: str, leaf: Any) -> list[tuple[str, ...]]:
    """For each axis of an array the axes of the mesh, of more than one device, that the model cuts
    it along.

    Raises:
        JaxmemError: there is no such axis, or its length is no multiple.
    """
    found: list[tuple[str, ...]] = [()] * leaf.ndim
    for name, cut in cuts:
        at = cut(path, leaf) if leaf.ndim and leaf.size else None
        if at is None or counts[name] == 1:
            continue
        if not isinstance(at, int) or not -leaf.ndim <= at < leaf.ndim:
            raise JaxmemError(
                f"split[{name!r}] says that {path} of shape {list(leaf.shape)} is cut along axis "
                f"{shown(at)}; return one of its axes, or None."
            )
        ways = counts[name]
        for other in found[at]:
            ways *= counts[other]
        if leaf.shape[at] % ways:
            raise JaxmemError(
                f"split[{name!r}] cuts axis {at} of {path}, of shape {list(leaf.shape)}, into "
                f"{ways} pieces; it is no multiple of it."
            )
        found[at] = (*found[at], name)
    return found


def batch_specs(cuts: Cuts, counts: Mapping[str, int], rows: tuple[str, ...], batch: Any) -> Any:
    """The spec of each array of a batch: its first axis along ``rows``, others as the model says.

    Raises:
        JaxmemError: a first axis that the devices do not divide.
    """
    devices = math.prod(counts[name] for name in rows)

    def spec(path: str, leaf: Any) -> PartitionSpec:
        path = f"{_BATCH}{path}"
        if not leaf.ndim or leaf.shape[0] % devices:
            raise JaxmemError(
                f"{path} has shape {list(leaf.shape)}, and its first axis is to be spread over "
                f"{devices} devices. Make it a multiple."
            )
        first, *others = cut_axes(cuts, counts, path, leaf)
        return spec_of([(*rows, *first), *others])

    return specs_of(spec, batch)


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
