"""Shapes of a mesh of so many devices: copies, pieces, and axes that the model names."""

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from jaxmem import jaxprs
from jaxmem.ground.checks import is_count, shown
from jaxmem.ground.errors import JaxmemError
from jaxmem.ground.words import pluralize
from jaxmem.levers.sharding import Sharding, shard
from jaxmem.levers.splitting import Cut, UndividedError, check_cuts, cut_axis, cuts_of

REPLICA, DATA = "replica", "data"
Shape = tuple[tuple[str, int], ...]  # names of axes and their sizes
Split = Mapping[str, Cut]


class Meshes:
    """The meshes that `fit` may take: the one that was given, or all shapes of so many devices.

    Attributes:
        shapes: of those that are searched, the one whose parameters are in the most pieces without
            the model's own axes first; of a mesh that was given none.
        refused: why a shape is not searched, in words; empty: all are.
    """

    def __init__(
        self,
        mesh: Mesh | AbstractMesh | None,
        devices: int | Sequence[jax.Device] | None,
        split: Split | None,
        params: Any,
        batch: Any,
    ):
        if mesh is not None and devices is not None:
            raise JaxmemError(
                "jaxmem.fit takes mesh= or devices=: a mesh that is known, or how many devices "
                "there are, whose mesh it chooses."
            )
        if split is not None and mesh is None and devices is None:
            raise JaxmemError(
                "split= cuts arrays along axes of a mesh: pass mesh= with them, or devices=."
            )
        if mesh is not None:
            shard(mesh)  # checks that it is one
        self.split, self.mesh = split, mesh
        self.refused = ""
        self._cut = [name for name, _ in cuts_of(split)]
        for name in {REPLICA, DATA} & set(self._cut) if devices is not None else ():
            raise JaxmemError(
                f"split= names an axis {name!r}, which is a name of an axis of jaxmem.fit's own: "
                f"with devices= it makes meshes of {REPLICA!r}, {DATA!r} and the axes of split=. "
                "Name it otherwise, or pass a mesh= with your axes."
            )
        self._params, self._batch = params, batch
        self._devices = _listed(devices)
        self.count = mesh.size if mesh is not None else 1
        if devices is not None:
            self.count = len(self._devices) if self._devices else int(devices)  # type: ignore
        if mesh is not None:
            self.sharding((), 1)  # checks its axes
        self.shapes: list[Shape] = []

    def choose(self, node: int) -> None:
        """Finds the shapes; so many devices have links of their own.

        Raises:
            JaxmemError: no shape divides batch and parameters.
        """
        check_cuts(cuts_of(self.split), self._batch)
        if self.mesh is not None or self.count == 1:
            return
        refused: list[str] = []
        params = jax.tree.map(jaxprs.abstract, self._params)
        for is_node_aligned in (_fills_nodes, _within_node, _is_whole):
            for shape in self._all(node, is_node_aligned):
                try:
                    sharding = self.sharding(shape, 3)
                    sharding.place_batch(self._batch)
                    sharding.place_params(params)
                except UndividedError as error:
                    refused.append(f"{describe(shape)}: {error.what}")
                else:
                    self.shapes.append(shape)
            if self.shapes:
                break
        if not self.shapes:
            raise JaxmemError(
                f"No mesh of {pluralize(self.count, 'device')} divides the step. {refused[0]} "
                f"{self._advice}"
            )
        if refused:
            many = f"{len(refused)} shapes that do not divide the step, such as "
            if len(refused) == 1:
                many = "a shape that does not divide the step, "
            self.refused = f"{many}{refused[0]} {self._advice}"

    @property
    def _advice(self) -> str:
        other = "number of devices" if self.mesh is None else "mesh"
        return f"Make it a multiple, or take another {other}."

    @contextlib.contextmanager
    def placing(self) -> Iterator[None]:
        """Says of what is not divided what a caller of `fit` can do."""
        try:
            yield
        except UndividedError as error:
            raise JaxmemError(f"{error.what} {self._advice}") from error

    def _all(
        self, node: int, is_node_aligned: Callable[[int, int, int, int], bool]
    ) -> Iterator[Shape]:
        """Shapes by how many parts the model's own axes make, then by copies: those that lie well,
        by how many copies there are, their parts along both kinds of axes, and a node's devices."""
        sizes = {
            name: [1, *_doubled(min(self.count, node) if name in self._cutting else self.count)]
            for name in self._cut
        }
        own = sorted(itertools.product(*sizes.values()), key=lambda one: (math.prod(one), one))
        for model in own:
            inner = math.prod(model)
            if self.count % inner:
                continue
            rest = self.count // inner
            for copies in [1, *range(2, rest + 1)]:
                data = rest // copies
                if rest % copies or not is_node_aligned(copies, data, inner, min(node, self.count)):
                    continue
                named = list(zip(self._cut, model, strict=True))
                first = [(REPLICA, copies)] if copies > 1 or named else []
                yield (*first, (DATA, data), *named)

    def first_using_only(self, name: str) -> Shape | None:
        """The first shape that has several devices along no other of the model's axes; None: the
        model does not name it, or there is none."""
        others = {one for one in self._cut if one != name}
        return next(
            (
                shape
                for shape in self.shapes
                if name in self._cut
                and dict(shape)[name] > 1
                and all(dict(shape)[one] == 1 for one in others)
            ),
            None,
        )

    def mesh_of(self, shape: Shape) -> Mesh | AbstractMesh | None:
        """The mesh of a shape: of real devices, if they were given."""
        if not shape:
            return self.mesh
        names, sizes = zip(*shape, strict=True)
        if self._devices is not None:
            return jax.make_mesh(sizes, names, devices=self._devices)
        return AbstractMesh(sizes, names)

    def sharding(self, shape: Shape, stage: int) -> Sharding:
        """How state is sharded on it: along its last axis that the model does not name, and those
        that it cuts no parameter along."""
        mesh = self.mesh_of(shape)
        assert mesh is not None
        names = [name for name in mesh.axis_names if name not in self._cut]
        others = [
            name
            for name in mesh.axis_names
            if name in self._cut and name not in self._cutting and mesh.shape[name] > 1
        ]
        axis = (*names[-1:], *others)
        return shard(mesh, axis[0] if len(axis) == 1 else axis, stage=stage, split=self.split)

    @functools.cached_property
    def _cutting(self) -> set[str]:
        """The axes that the model cuts parameters along."""
        leaves = jax.tree.leaves_with_path(self._params)
        weights = [(jax.tree_util.keystr(path), leaf) for path, leaf in leaves]
        return {
            name
            for name, cut in cuts_of(self.split)
            if any(cut_axis(name, cut, path, leaf) is not None for path, leaf in weights)
        }

    def model(self, sharding: Sharding) -> int:
        """Into how many pieces the model itself cuts its parameters."""
        weights = [name for name in sharding.model if name in self._cutting]
        return math.prod(sharding.mesh.shape[name] for name in weights)


def _fills_nodes(copies: int, data: int, own: int, node: int) -> bool:
    """One copy, or each of whole nodes."""
    return copies == 1 or (data > 1 and data * own % node == 0)


def _within_node(copies: int, data: int, own: int, node: int) -> bool:
    """Copies in several parts, each on a part of a node."""
    return copies > 1 and data > 1 and data * own < node and node % (data * own) == 0


def _is_whole(copies: int, data: int, own: int, node: int) -> bool:
    """Copies that the model's own axes alone cut."""
    return copies > 1 and data == 1 and node % own == 0


def describe(shape: Shape) -> str:
    """A shape in words: 8 replica x 8 data."""
    sizes = [f"{size} {name}" for name, size in shape if size > 1]
    return " x ".join(sizes) or "1 device"


def _doubled(most: int) -> list[int]:
    return [2**at for at in range(1, most.bit_length()) if 2**at <= most]


def _listed(devices: Any) -> list[jax.Device] | None:
    """Real devices; None: so many that need not be there."""
    if devices is None or is_count(devices):
        return None
    listed = list(devices) if isinstance(devices, Sequence) else []
    if not listed or not all(isinstance(one, jax.Device) for one in listed):
        raise JaxmemError(
            "jaxmem.fit takes devices=, an int of 1 or more or a list of jax.devices(); got "
            f"{shown(devices)}."
        )
    return listed
