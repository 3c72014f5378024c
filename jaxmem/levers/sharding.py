"""FSDP, that is ZeRO stages 1 to 3, through `NamedSharding` on a mesh."""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import optax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jaxmem import jaxprs
from jaxmem.ground.checks import (
    check_callable,
    check_optimizer,
    check_state,
    is_count,
    shown,
)
from jaxmem.ground.errors import JaxmemError
from jaxmem.ground.words import pluralize
from jaxmem.levers.gathering import gathered_where_read
from jaxmem.levers.placing import bytes_table, placed
from jaxmem.levers.splitting import (
    Cut,
    Cuts,
    UndividedError,
    batch_specs,
    cut_axes,
    cuts_of,
    is_kept,
    names_of,
    others,
    spec_of,
    specs_of,
)

_SMALL = 2**14  # values, 64 KiB of float32; chosen, and not measured


def _is_small(path: str, leaf: Any) -> bool:
    """What every device keeps a copy of: under 16,384 values."""
    return leaf.size < _SMALL


@dataclasses.dataclass(frozen=True)
class Sharding:
    """How a model lies on a mesh; `shard` makes it."""

    mesh: Mesh | AbstractMesh
    axis: str | tuple[str, ...]
    replicas: tuple[str, ...]
    stage: int
    scanned: str | None
    keep: Callable[[str, Any], bool]
    split: Cuts = ()

    @property
    def count(self) -> int:
        """Devices that a parameter is spread over."""
        return self._devices(names_of(self.axis))

    @property
    def rows(self) -> tuple[str, ...]:
        """The axes of the mesh that a batch's examples are spread over."""
        cut = {name for name, _ in self.split}
        return tuple(name for name in (*self.replicas, *names_of(self.axis)) if name not in cut)

    @property
    def model(self) -> tuple[str, ...]:
        """The axes of the mesh, of several devices, that the model cuts its arrays along."""
        return tuple(name for name, _ in self.split if self.mesh.shape[name] > 1)

    # ---- where things lie

    def specs(self, tree: Any) -> Any:
        """The `PartitionSpec` of each leaf when it is spread.

        Raises:
            JaxmemError: a large leaf that the devices do not divide.
        """
        return specs_of(self._spec, tree)

    def place_params(self, params: Any) -> Any:
        """Parameters where they belong: spread at stage 3, else on every device.

        Arrays are put there; abstract leaves (`jax.ShapeDtypeStruct`) get the sharding, and what
        is in host memory stays there.

        Raises:
            JaxmemError: a large leaf that the devices do not divide, or no path with ``scanned``
                in it.
        """
        paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(params)]
        if self.scanned is not None and not any(self.scanned in path for path in paths):
            raise JaxmemError(
                f"No parameter has {self.scanned!r} in its path, which jaxmem.shard(scanned=...) "
                f"names those that are stacked over layers by; there are {', '.join(paths[:8])}."
            )
        return placed(self.mesh, params, self._params_specs(params))

    def place_state(self, state: Any) -> Any:
        """An optimizer's state where it belongs: spread, as the parameters are at stage 3."""
        return placed(self.mesh, state, self.specs(state))

    def place_batch(self, batch: Any) -> Any:
        """A batch, its first axis spread over all the devices, but along axes that the model
        names."""
        specs = batch_specs(self.split, self.mesh.shape, self.rows, batch)
        return placed(self.mesh, batch, specs)

    def replicate(self, tree: Any) -> Any:
        """A tree with a copy on every device."""
        return placed(self.mesh, tree)

    def init(self, make: Callable, *args: Any) -> Any:
        """The parameters that ``make(*args)`` returns, each device making its part alone."""
        shapes = jax.eval_shape(make, *args)
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self.place_params(shapes))
        return jax.jit(make, out_shardings=shardings)(*args)

    # ---- what happens

    def optimizer(
        self, optimizer: optax.GradientTransformation
    ) -> optax.GradientTransformationExtraArgs:
        """``optimizer`` with its state spread, and with it the work of updating.

        From stage 2 on gradients are spread too: they are summed by reduce-scatter. At stages 1
        and 2 the updates are gathered, at stage 3 they stay spread like the parameters.

        Raises:
            OffloadError: at init, ``optimizer`` is a `jaxmem.offload`, which goes outside.
        """
        optimizer = check_optimizer(optimizer, "Sharding.optimizer")

        def init(params):
            state = optimizer.init(params)
            jaxprs.check_on_device("Sharding.optimizer", state)
            return self._constrain(state)

        def update(updates, state, params=None, **extra):
            check_state(optimizer.init, optimizer.update, updates, state, params, extra)
            if self.stage >= 2:
                updates = self._constrain(updates)
            spread = None if params is None else self._constrain(params)
            updates, state = optimizer.update(updates, state, spread, **extra)
            updates = self._constrain(updates)
            if self.stage < 3:
                updates = jax.tree.map(self._gathered, updates, self.specs(updates))
            return updates, self._constrain(state)

        return optax.GradientTransformationExtraArgs(init, update)

    def gather(self, fun: Callable, *, policy: Callable | None = None) -> Callable:
        """``fun(params, *args)`` as a region whose parameters are gathered for it alone.

        The parameters are gathered for the forward pass, dropped, and gathered again for the
        backward pass (ZeRO-3). Without it XLA gathers once and keeps all of them, and a region
        without the barrier in it is not enough either: XLA merges the two gathers.

        Args:
            fun: a layer, say, its parameters first.
            policy: of `jax.checkpoint`, for what else the region keeps; None: nothing but its
                inputs.

        Raises:
            JaxmemError: the model cuts its parameters along axes of its own.
        """
        if self.model:
            raise JaxmemError(
                "Sharding.gather does not know how the parameters of a layer are cut along "
                f"{', '.join(self.model)}. Make a region of the layer with jax.checkpoint: a step "
                "with sharding= gathers each weight where it is read."
            )
        if self.stage < 3:
            return fun if policy is None else jax.checkpoint(fun, policy=policy)

        def region(params, *args, **kwargs):
            params, args = jax.lax.optimization_barrier((params, args))
            return fun(jax.tree.map(self._gathered, params), *args, **kwargs)

        return functools.wraps(fun)(jax.checkpoint(region, policy=policy))

    def gathered_where_read(self, fun: Callable) -> Callable:
        """``fun(params, *args)`` whose parameters are gathered where it reads them, as a step with
        ``sharding=`` has them: a scan over layers gathers one layer's at a time, and again in the
        backward pass, as do regions of the function's own and plans. At stages 1 and 2 there is
        nothing to gather."""
        if self.stage < 3 or self.count == 1:
            return fun

        @functools.wraps(fun)
        def gathered(params, *args):
            specs = jax.tree.leaves(self.specs(params), is_leaf=_is_spec)
            spread = [spec if self._spreads(spec) else None for spec in specs]
            return gathered_where_read(fun, spread, self._gathered)(params, *args)

        return gathered

    def context(self) -> contextlib.AbstractContextManager:
        """In which a step is traced and run: the mesh is in force there for a model that names
        axes, and in the place of another, such as that of `jax.set_mesh`."""
        current = jax.sharding.get_abstract_mesh()
        same = current.shape == self.mesh.shape and AxisType.Explicit not in current.axis_types
        if not self.split and (current.empty or same):
            return contextlib.nullcontext()
        return jaxprs.mesh_in_force(self.mesh)

    def report(self, params: Any, state: Any = ()) -> str:
        """Bytes on each device of parameters and optimizer state, and what is not spread."""
        own = self._params_specs(params)
        trees = {"parameters": (params, own), "state": (state, self.specs(state))}
        spread = {"parameters": self.stage == 3, "state": True}
        return f"{self}\n{bytes_table(self.mesh, trees, spread)}"

    def __str__(self):
        copies = self._devices(self.replicas)
        times = f", {copies} times ({', '.join(self.replicas)})" if copies > 1 else ""
        if self.model:
            cut = " x ".join(f"{self.mesh.shape[name]} ({name})" for name in self.model)
            times += f", the model's own axes {cut}"
        spread = pluralize(self.count, "device")
        axes = f" ({self._axis})" if self._axis else ""
        return f"ZeRO stage {self.stage} over {spread}{axes}{times}"

    # ---- pieces

    @property
    def _axis(self) -> str:
        return ", ".join(names_of(self.axis))

    def _devices(self, axes: Iterable[str]) -> int:
        return math.prod(self.mesh.shape[axis] for axis in axes)

    def _spreads(self, spec: PartitionSpec) -> bool:
        """Whether an array of that spec is spread along the axis."""
        return any(set(names_of(part)) & set(names_of(self.axis)) for part in spec)

    def _cut(self, path: str, leaf: Any) -> PartitionSpec:
        """How the model itself cuts a parameter, or what is like it."""
        if not self.model or is_kept(self.keep, path, leaf):
            return PartitionSpec()
        return spec_of(cut_axes(self.split, self.mesh.shape, path, leaf, names_of(self.axis)))

    def _params_specs(self, params: Any) -> Any:
        spec = self._spec if self.stage == 3 else self._cut
        return specs_of(spec, params)

    def _spec(self, path: str, leaf: Any) -> PartitionSpec:
        if is_kept(self.keep, path, leaf):
            return PartitionSpec()
        first = 1 if self.scanned is not None and self.scanned in path else 0
        parts = cut_axes(self.split, self.mesh.shape, path, leaf, names_of(self.axis))
        fits = [
            axis
            for axis in range(first, leaf.ndim)
            if leaf.shape[axis] % self.count == 0 and not parts[axis]
        ]
        if not fits and path.endswith(".scales"):  # of 8 bits: small beside their codes
            return PartitionSpec()
        if not fits:
            raise UndividedError(
                f"{path} of shape {list(leaf.shape)} cannot be spread over "
                f"{pluralize(self.count, 'device')} ({self._axis}): no axis"
                f"{' after the layers' if first else ''} is a multiple.",
                "Pad it, or let every device keep a copy: jaxmem.shard(keep=lambda path, leaf: "
                "...).",
            )
        widest = max(fits, key=lambda axis: leaf.shape[axis])
        parts[widest] = names_of(self.axis)
        return spec_of(parts)

    def _constrain(self, tree: Any) -> Any:
        return jax.tree.map(
            lambda leaf, spec: jax.lax.with_sharding_constraint(
                leaf, NamedSharding(self.mesh, spec)
            ),
            tree,
            self.specs(tree),
        )

    def _gathered(self, leaf: Any, spec: PartitionSpec | None = None) -> Any:
        """A leaf, whole. With its spec it is sent as it is, and not what it was cast from; its
        cotangent is summed into that spec."""
        whole = PartitionSpec()
        if spec is not None:
            leaf = jax.lax.with_sharding_constraint(leaf, NamedSharding(self.mesh, spec))
            whole = spec_of([others(part, names_of(self.axis)) for part in spec])
        return jax.lax.with_sharding_constraint(leaf, NamedSharding(self.mesh, whole))


def _is_spec(value: Any) -> bool:
    return isinstance(value, PartitionSpec)


def shard(
    mesh: Mesh | AbstractMesh,
    axis: str | tuple[str, ...] | None = None,
    *,
    stage: int = 3,
    scanned: str | None = None,
    keep: Callable[[str, Any], bool] = _is_small,
    split: Mapping[str, Cut] | None = None,
) -> Sharding:
    """A model's parameters, gradients and optimizer state spread over devices.

    ZeRO (Rajbhandari et al. 2020): stage 1 spreads the optimizer state, stage 2 the gradients too,
    stage 3 the parameters too, which is FSDP. Every array is spread along its largest axis that
    the devices divide. Nothing is sent by hand: the shardings are constraints, and XLA places
    the collectives (`jaxmem.memory(...).collectives` counts them).

    Args:
        mesh: of devices, or an abstract one to compile for devices that are not there
            (``jaxmem.target(name, count=64)``).
        axis: that parameters are spread along, or several, or none, ``()``; None: the last one of
            the mesh that the model does not name. Over the others they are copied, and the batch
            is spread over all (hybrid sharding).
        stage: 1, 2 or 3.
        scanned: what is in the path of parameters that are stacked over layers ("blocks", say):
            their first axis, which a scan slices, is never the one.
        keep: ``keep(path, leaf)``: what every device keeps a copy of; arrays of fewer than
            16,384 values.
        split: axes of the mesh that the model names (tensor, expert, sequence parallel), and which
            axis of an array is cut along each: ``{"model": lambda path, leaf: ...}`` returns the
            number of an axis, or None, of a parameter or of what is like one in the optimizer's
            state; the paths of a batch's arrays begin with "batch". The loss of a step is traced
            with the mesh as context, so bare `jax.sharding.PartitionSpec`s and `jax.shard_map`
            in it find its axes.

    Raises:
        JaxmemError: an axis that the mesh does not have, no such stage, or no such ``split``.

    >>> import jax, jax.numpy as jnp, jaxmem
    >>> mesh = jax.sharding.AbstractMesh((8,), ("data",))
    >>> fsdp = jaxmem.shard(mesh)
    >>> print(fsdp)
    ZeRO stage 3 over 8 devices (data)
    >>> fsdp.specs({"kernel": jnp.ones((512, 2048)), "bias": jnp.ones(2048)})["kernel"][1]
    'data'
    """
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise JaxmemError(
            "jaxmem.shard takes a jax.sharding.Mesh or AbstractMesh, such as "
            f'jax.make_mesh((8,), ("data",)); got {shown(mesh)}.'
        )
    names, cuts = mesh.axis_names, cuts_of(split)
    cut = {name for name, _ in cuts}
    if axis is None:
        axis = next((name for name in reversed(names) if name not in cut), names[-1])
    of_axis = names_of(axis)
    if not all(isinstance(name, str) for name in of_axis) or len(set(of_axis)) < len(of_axis):
        raise JaxmemError(
            "jaxmem.shard takes axis=, an axis of the mesh that parameters are spread along, or "
            f"several in a tuple, each once; got {shown(axis)}."
        )
    for name in (*of_axis, *cut):
        if name not in names:
            raise JaxmemError(
                f"The mesh has no axis {shown(name)}; its axes are {', '.join(map(repr, names))}."
            )
    if not is_count(stage) or stage > 3:
        raise JaxmemError(f"ZeRO has the stages 1, 2 and 3; got stage={shown(stage)}.")
    if scanned is not None and (not isinstance(scanned, str) or not scanned):
        raise JaxmemError(
            "jaxmem.shard takes scanned=, text that is in the paths of parameters that are stacked "
            f"over layers; got {shown(scanned)}."
        )
    check_callable(keep, "jaxmem.shard(keep=...)")
    automatic = (AxisType.Auto,) * len(names)  # XLA places collectives on such axes alone
    if isinstance(mesh, Mesh):
        mesh = Mesh(mesh.devices, names, axis_types=automatic)
    else:
        mesh = AbstractMesh(mesh.axis_sizes, names, axis_types=automatic)
    replicas = tuple(name for name in names if name not in (*names_of(axis), *cut))
    return Sharding(mesh, axis, replicas, stage, scanned, keep, cuts)
