"""The devices that take part in a collective, in each form in which XLA writes their groups."""

import re

import numpy as np

_TILES = r"\[([\d,]+)\](?:T\(([\d,]+)\))?"
_PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")
_LISTED = re.compile(r"replica_groups=\{\{([\d,]+)\}")
_TILED = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=" + _TILES)
# A mesh's devices: ``[4,2]T(1,0)``, as XLA writes them since jax 0.10.2, or with a shape before.
_ORDER = re.compile(r"(?:\[[\d,]+\]<=)?" + _TILES)
# Axes of a mesh, as ``mesh['data'=4,'model'=2] {'model'}``; `Mesh::ToString` of XLA.
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\((.*?)\))? \{([^}]*)\}")
_AXIS = re.compile(r"([^,=]+)=(\d+)")
# An axis, or the part of it that has so many parts before it: ``'model':(2)4``.
_PART = re.compile(r"([^,:]+)(?::\((\d+)\)(\d+))?")


def first_group(line: str, count: int) -> np.ndarray:
    """The devices of the first group of a collective: int ``[size]``.

    Args:
        line: the right-hand side of its instruction.
        count: of all devices; they are one group where none is written.
    """
    if listed := _LISTED.search(line):
        return _numbers(listed[1])
    if tiled := _TILED.search(line):
        return _tiled(tiled[3], tiled[4]).reshape(int(tiled[1]), int(tiled[2]))[0]
    if mesh := _MESH.search(line):
        return _on_axes(*mesh.groups())
    return np.arange(count)


def pairs_of(line: str) -> np.ndarray:
    """The devices that each sends to another: int ``[pairs, 2]``; empty where none are written."""
    listed = _PAIRS.search(line)
    return _numbers(re.sub("[{}]", "", listed[1])).reshape(-1, 2) if listed else np.zeros((0, 2))


def _on_axes(axes: str, devices: str | None, parts: str) -> np.ndarray:
    sizes = {name: int(size) for name, size in _AXIS.findall(axes)}
    places = {name: np.zeros(1, int) for name in sizes}
    for name, before, size in _PART.findall(parts):
        if size:  # of the axis as [before, size, the rest]
            rest = sizes[name] // (int(before) * int(size))
            places[name] = np.add.outer(places[name], rest * np.arange(int(size))).ravel()
        else:
            places[name] = np.arange(sizes[name])
    return _mesh(devices, sizes)[np.ix_(*places.values())].ravel()


def _mesh(devices: str | None, sizes: dict[str, int]) -> np.ndarray:
    """The devices of a mesh by its axes."""
    shape = list(sizes.values())
    if not devices:
        return np.arange(np.prod(shape)).reshape(shape)
    tiles = _ORDER.fullmatch(devices)
    return (_tiled(tiles[1], tiles[2]) if tiles else _numbers(devices)).reshape(shape)


def _tiled(shape: str, order: str | None) -> np.ndarray:
    lengths = _numbers(shape)
    devices = np.arange(np.prod(lengths)).reshape(lengths)
    return devices.transpose(_numbers(order)) if order else devices


def _numbers(text: str) -> np.ndarray:
    return np.array([int(one) for one in text.split(",")])
