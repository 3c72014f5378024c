"""What is to fit: a loss, an optimizer and a batch, on a target, and what may be done."""

import copy
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, Mesh

from jaxmem import jaxprs
from jaxmem.fitting.levers import LEVERS, Levers, allowed, kept
from jaxmem.fitting.meshes import Meshes, Split
from jaxmem.fitting.sizes import bytes_of
from jaxmem.ground.bytes import device_budget
from jaxmem.ground.checks import check_batch, check_callable, check_optimizer
from jaxmem.ground.errors import JaxmemError
from jaxmem.ground.words import pluralize
from jaxmem.levers.mixed_precision.loss_scale import LossScale
from jaxmem.levers.mixed_precision.policy import Precision, precision as parse_precision
from jaxmem.levers.sharding import Sharding
from jaxmem.rematerialization import Plan, remat
from jaxmem.targets import LocalDevice, Target, example, family_of, resolve
from jaxmem.training import TrainState, TrainStep, train_step


class Workload:
    """The arguments of `fit`, checked, and the steps that levers make of them.

    Attributes:
        options: the settings of the levers to search.
        refused: what is not searched, by name, and why.
        reduction: what the loss is taken for where it is not proved.
        offload: whether residuals of scans may wait in host memory.
        meshes: those that may be taken; ``mesh`` is one of them, of that ``shape``.
    """

    shape: tuple = ()

    def __init__(
        self,
        loss_fn: Callable,
        optimizer: optax.GradientTransformation,
        params: Any,
        batch: Any,
        *,
        budget: int | str | None = None,
        target: str | Target | LocalDevice | None = None,
        model_state: Any = None,
        key: jax.Array | None = None,
        precision: str | Precision | None = None,
        loss_scale: LossScale | None = None,
        mesh: Mesh | AbstractMesh | None = None,
        devices: int | Sequence[jax.Device] | None = None,
        split: Split | None = None,
        allow: str | Collection[str] = (),
        keep: str | Collection[str] = (),
    ):
        check_callable(loss_fn, "jaxmem.fit")
        check_optimizer(optimizer, "jaxmem.fit")
        self.loss_fn, self.optimizer = loss_fn, optimizer
        self.params, self.model_state, self.key = params, model_state, key
        check_batch(batch)
        self.batch = jax.tree.map(_abstract, batch)
        self.precision = None if precision is None else parse_precision(precision)
        self.loss_scale = loss_scale
        self.allow = _names_in(allow, "allow", allowed())
        self.keep = _names_in(keep, "keep", {**allowed(), **kept()})
        for name in sorted(self.allow & self.keep):
            raise JaxmemError(f"allow= and keep= both name {name!r}. Remove it from one of them.")
        self.meshes = Meshes(mesh, devices, split, self.params, self.batch)
        self._place(resolve(target))
        self.budget = device_budget(budget, self.target.usable_bytes, self.target.name)
        self.refused: dict[str, str] = {}
        self.found: dict[str, Any] = {}  # by the name of a lever: what it knows of the loss
        self.reduction: str | None = None
        self._steps: dict[Levers, TrainStep] = {}  # before they are planned
        self._states: dict[Levers, TrainState] = {}
        self._on: dict[tuple, Workload] = {}  # by the mesh
        self.offload = "placement" not in self.keep  # residuals of scans may wait in host memory
        self.as_is = Levers(**{name: lever.as_is(self) for name, lever in LEVERS.items()})
        self.may("residuals")
        self.may("regions")
        values = {name: lever.values(self) for name, lever in LEVERS.items()}
        every = (
            Levers(**dict(zip(values, chosen, strict=True)))
            for chosen in itertools.product(*values.values())
        )
        self.options = [levers for levers in every if self._divides(levers)]

    def refuse_offload(self, why: str) -> None:
        """Residuals of scans may not wait in host memory."""
        self.refused["residuals in host memory"] = why
        self.offload = False

    def _divides(self, levers: Levers) -> bool:
        """Whether the part of the batch that a device has is cut into whole slices."""
        sizes = {leaf.shape[0] if leaf.shape else 1 for leaf in jax.tree.leaves(self.batch)}
        pieces = levers.microbatches * self.on(levers).data_parallel_size
        return levers.microbatches == 1 or all(size % pieces == 0 for size in sizes)

    def _place(self, target: Target | LocalDevice) -> None:
        self.mesh, self.devices = self.meshes.mesh, self.meshes.count
        if target.count == 1 < self.devices:
            target = _of_count(target, self.devices)
        if target.count != self.devices:
            raise JaxmemError(
                f"The mesh has {pluralize(self.devices, 'device')} and the target {target.count}: "
                "pass one device as target, or as many."
            )
        if target.known is None:
            raise JaxmemError(
                f"jaxmem.fit has no figures (memory, bandwidth, FLOP/s) of {target.description}. "
                f"Name a device that it knows: {example()} (python -m jaxmem targets lists them)."
            )
        known = target.known
        self.target = target
        self.device = known if known.count == self.devices else known.of_count(self.devices)
        self._given = self.batch
        self.meshes.choose(self.device.links.node)
        if self.devices > 1 or self.mesh is not None:
            first = self.meshes.shapes[0] if self.meshes.shapes else ()
            self._put(first)

    def _put(self, shape: tuple) -> None:
        self.shape, self.mesh = shape, self.meshes.mesh_of(shape)
        with self.meshes.placing():
            self.batch = self.meshes.sharding(shape, 1).place_batch(self._given)

    def on(self, levers: Levers) -> "Workload":
        """The same workload on the mesh of some levers."""
        if levers.mesh in ((), self.shape):
            return self
        if levers.mesh not in self._on:
            self._on[levers.mesh] = other = copy.copy(self)
            other._put(levers.mesh)
        return self._on[levers.mesh]

    @functools.cached_property
    def data_parallel_sizes(self) -> set[int]:
        """The same of every mesh that is searched."""
        return {
            self.on(Levers(mesh=shape)).data_parallel_size for shape in self.meshes.shapes or [()]
        }

    @property
    def data_parallel_size(self) -> int:
        """Over how many devices the examples of a batch are spread."""
        mesh, rows = self.rows
        return math.prod(mesh.shape[axis] for axis in rows) if mesh else 1

    @property
    def rows(self) -> tuple[Mesh | AbstractMesh | None, tuple[str, ...]]:
        """The mesh, and the axes of it that the examples of a batch are spread over."""
        if self.mesh is None:
            return None, ()
        sharding = self.meshes.sharding(self.shape, 1)  # its mesh has automatic axes
        return sharding.mesh, sharding.rows

    def may(self, name: str) -> bool:
        """Whether something may be searched; if not, ``refused`` says why."""
        if name in self.keep:
            self.refused[name] = "it is to be kept"
        elif name in allowed() and name not in self.allow:
            self.refused[name] = f"would {allowed()[name]}; allow=({name!r},)"
        return name not in self.refused

    @functools.cached_property
    def has_large_state(self) -> bool:
        """Whether the optimizer has a state that is worth a lever, all of it on the device."""
        state = jax.tree.leaves(self.state(self.as_is).opt_state)
        large = [leaf for leaf in state if leaf.ndim and leaf.size]
        placed = any(jaxprs.memory_space(leaf) is jaxprs.HOST for leaf in large)
        return bool(large) and not placed

    def sharding(self, stage: int) -> Sharding | None:
        """How state is sharded at a stage of ZeRO's."""
        if self.mesh is None or not stage:
            return None
        return self.meshes.sharding(self.shape, stage)

    def step(self, levers: Levers, plan: Plan | None = None) -> TrainStep:
        """The step of some levers, with a plan or before it is planned."""
        if plan is not None:
            return self._make_step(levers, plan)
        if levers not in self._steps:
            self._steps[levers] = self._make_step(levers, None)
        return self._steps[levers]

    def _make_step(self, levers: Levers, plan: Plan | None) -> TrainStep:
        loss_fn, optimizer = self.loss_fn, self.optimizer
        options: dict[str, Any] = {}
        place = self.on(levers)
        for lever, value in levers.used():
            loss_fn = lever.loss(place, loss_fn, value)
            optimizer = lever.optimizer(place, optimizer, value)
            options |= lever.options(place, value)
        transform: Callable | None = functools.partial(remat, plan=plan)
        if plan is not None and not plan.changes:
            transform = None
        planned = family_of(self.device).planned_options(self.budget)
        plain = train_step(
            loss_fn,
            optimizer,
            remat=transform,
            reduction=self.reduction,
            loss_scale=self.loss_scale,
            **options,
        )
        step = TrainStep(
            dataclasses.replace(plain.settings, freezes=True),
            plan.compiler_options if plan else planned,
        )
        with self.meshes.placing():
            step.abstract(self.params, model_state=self.model_state, key=self.key)
        return step

    def state(self, levers: Levers) -> TrainState:
        """The abstract state of the levers' step."""
        alike = levers.only(lambda lever: lever.changes_state)
        if alike not in self._states:
            self._states[alike] = self.step(alike).abstract(
                self.params, model_state=self.model_state, key=self.key
            )
        return self._states[alike]

    def gradients(self, levers: Levers) -> Any:
        """Abstract gradients as they lie: spread like the optimizer's state at every stage, also
        where that is not asked for, since the update reads them so."""
        params, sharding = self.state(levers).params, self.on(levers).sharding(levers.stage)
        return params if sharding is None else sharding.place_state(params)

    def host_bytes(self, levers: Levers) -> int:
        """Of the optimizer's state, on each device's host."""
        leaves = jax.tree.leaves(self.state(levers).opt_state)
        return bytes_of([leaf for leaf in leaves if jaxprs.memory_space(leaf) is jaxprs.HOST])


def _of_count(target: Target | LocalDevice, count: int) -> Target | LocalDevice:
    if isinstance(target, Target):
        return target.of_count(count)
    return dataclasses.replace(target, count=count)


def _abstract(leaf: Any) -> Any:
    return jaxprs.abstract(leaf if hasattr(leaf, "shape") else jnp.asarray(leaf))


def _names_in(given: str | Collection[str], argument: str, known: dict[str, str]) -> frozenset[str]:
    if isinstance(given, bytes) or not isinstance(given, str | Collection):
        raise JaxmemError(f"jaxmem.fit takes {argument}=, names as text; got {given!r}.")
    names = frozenset([given] if isinstance(given, str) else given)
    unknown = sorted(names - known.keys(), key=str)
    if unknown and unknown[0] in kept():
        raise JaxmemError(
            f"jaxmem.fit searches {unknown[0]!r} by default: leave it out of allow=, or name it in "
            "keep= if it is to stay as it is."
        )
    if unknown:
        raise JaxmemError(
            f"jaxmem.fit knows no {argument}={unknown[0]!r}; the names are "
            f"{', '.join(map(repr, known))}."
        )
    return names
