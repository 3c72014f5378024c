"""FSDP, that is ZeRO stages 1 to 3, through `NamedSharding` on a mesh."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import optax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jaxmem import jaxprs
from jaxmem.ground.bytes import format_bytes
from jaxmem.ground.checks import check_optimizer, check_state, shown
from jaxmem.ground.errors import JaxmemError
from jaxmem.levers.gathering import gathered_where_read
from jaxmem.targets import HOST_KIND

_SMALL = 2**14  # values, 64 KiB of float32; chosen, and not measured


def _is_small(path: str, leaf: Any) -> bool:
    """What every device keeps a copy of: under 16,384 values."""
    return leaf.size < _SMALL


@dataclasses.dataclass(frozen=True)
class Sharding:
    """How a model lies on a mesh; `shard` makes it."""

    mesh: Mesh | AbstractMesh
    axis: str
    replicas: tuple[str, ...]
    stage: int
    scanned: str | None
    keep: Callable[[str, Any], bool]

    @property
    def count(self) -> int:
        """Devices that a parameter is spread over."""
        return self.mesh.shape[self.axis]

    # ---- where things lie

    def specs(self, tree: Any) -> Any:
        """The `PartitionSpec` of each leaf when it is spread.

        Raises:
            JaxmemError: a large leaf that the devices do not divide.
        """
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: self._spec(jax.tree_util.keystr(path), leaf), tree
        )

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
        return self._place(params, self.specs(params) if self.stage == 3 else None)

    def place_state(self, state: Any) -> Any:
        """An optimizer's state where it belongs: spread, as the parameters are at stage 3."""
        return self._place(state, self.specs(state))

    def place_batch(self, batch: Any) -> Any:
        """A batch, its first axis spread over all the devices."""
        rows = PartitionSpec((*self.replicas, self.axis))
        devices = math.prod(self.mesh.shape[axis] for axis in (*self.replicas, self.axis))
        for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
            if not leaf.ndim or leaf.shape[0] % devices:
                raise JaxmemError(
                    f"batch{jax.tree_util.keystr(path)} has shape {list(leaf.shape)}, and its "
                    f"first axis is to be spread over {devices} devices. Make it a multiple."
                )
        return self._place(batch, jax.tree.map(lambda _: rows, batch))

    def replicate(self, tree: Any) -> Any:
        """A tree with a copy on every device."""
        return self._place(tree, None)

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
        check_optimizer(optimizer, "Sharding.optimizer")
        optimizer = optax.with_extra_args_support(optimizer)

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
                updates = jax.tree.map(self._gathered, updates)
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
        """
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
            spread = [spec if self.axis in spec else None for spec in specs]
            return gathered_where_read(fun, spread, self._gathered)(params, *args)

        return gathered

    def report(self, params: Any, state: Any = ()) -> str:
        """Bytes on each device of parameters and optimizer state, and what is not spread."""
        lines = [f"{self}", f"{'':12}{'whole':>14}{'each device':>14}"]
        copies = []
        for name, tree in (("parameters", params), ("state", state)):
            spread = name == "state" or self.stage == 3
            whole = each = 0
            for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
                size = math.prod(leaf.shape) * leaf.dtype.itemsize
                spec = self._spec(jax.tree_util.keystr(path), leaf) if spread else PartitionSpec()
                parts = self.count if self.axis in spec else 1
                if parts == 1 and spread and size:
                    copies.append(size)
                whole, each = whole + size, each + size // parts
            lines.append(f"{name:12}{format_bytes(whole):>14}{format_bytes(each):>14}")
        lines.append(f"{len(copies)} small arrays on every device: {format_bytes(sum(copies))}")
        return "\n".join(lines)

    def __str__(self):
        copies = math.prod(self.mesh.shape[axis] for axis in self.replicas)
        times = f", {copies} times ({', '.join(self.replicas)})" if self.replicas else ""
        return f"ZeRO stage {self.stage} over {self.count} devices ({self.axis}){times}"

    # ---- pieces

    def _spec(self, path: str, leaf: Any) -> PartitionSpec:
        if not leaf.size or not leaf.ndim or self.keep(path, leaf):
            return PartitionSpec()
        first = 1 if self.scanned is not None and self.scanned in path else 0
        fits = [axis for axis in range(first, leaf.ndim) if leaf.shape[axis] % self.count == 0]
        if not fits and path.endswith(".scales"):  # of 8 bits: small beside their codes
            return PartitionSpec()
        if not fits:
            raise JaxmemError(
                f"{path} of shape {list(leaf.shape)} cannot be spread over {self.count} devices "
                f"({self.axis}): no axis{' after the layers' if first else ''} is a multiple. Pad "
                "it, or let every device keep a copy: jaxmem.shard(keep=lambda path, leaf: ...)."
            )
        widest = max(fits, key=lambda axis: leaf.shape[axis])
        return PartitionSpec(*[None] * widest, self.axis)

    def _place(self, tree: Any, specs: Any) -> Any:
        def put(leaf, spec):
            on_host = jaxprs.memory_space(leaf) is jaxprs.HOST
            kind = HOST_KIND if on_host else None
            sharding = NamedSharding(self.mesh, spec, memory_kind=kind)
            if isinstance(leaf, jax.ShapeDtypeStruct):
                return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
            leaf = jax.device_put(leaf, sharding)
            return jax.device_put(leaf, jaxprs.HOST) if on_host else leaf

        if specs is None:
            specs = jax.tree.map(lambda _: PartitionSpec(), tree)
        return jax.tree.map(put, tree, specs)

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
        if spec is not None:
            leaf = jax.lax.with_sharding_constraint(leaf, NamedSharding(self.mesh, spec))
        return jax.lax.with_sharding_constraint(leaf, NamedSharding(self.mesh, PartitionSpec()))


def _is_spec(value: Any) -> bool:
    return isinstance(value, PartitionSpec)


def shard(
    mesh: Mesh | AbstractMesh,
    axis: str | None = None,
    *,
    stage: int = 3,
    scanned: str | None = None,
    keep: Callable[[str, Any], bool] = _is_small,
) -> Sharding:
    """A model's parameters, gradients and optimizer state spread over devices.

    ZeRO (Rajbhandari et al. 2020): stage 1 spreads the optimizer state, stage 2 the gradients too,
    stage 3 the parameters too, which is FSDP. Every array is spread along its largest axis that
    the devices divide. Nothing is sent by hand: the shardings are constraints, and XLA places
    the collectives (`jaxmem.memory(...).collectives` counts them).

    Args:
        mesh: of devices, or an abstract one to compile for GPUs that are not there
            (``jaxmem.target("h100", count=64)``).
        axis: that parameters are spread along; None: the last one of the mesh. Over the others
            they are copied, and the batch is spread over all (hybrid sharding).
        stage: 1, 2 or 3.
        scanned: what is in the path of parameters that are stacked over layers ("blocks", say):
            their first axis, which a scan slices, is never the one.
        keep: ``keep(path, leaf)``: what every device keeps a copy of; arrays of fewer than
            16,384 values.

    Raises:
        JaxmemError: an axis that the mesh does not have, or no such stage.

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
    names = mesh.axis_names
    axis = names[-1] if axis is None else axis
    if axis not in names:
        raise JaxmemError(
            f"The mesh has no axis {shown(axis)}; its axes are {', '.join(map(repr, names))}."
        )
    if stage not in (1, 2, 3):
        raise JaxmemError(f"ZeRO has the stages 1, 2 and 3; got stage={shown(stage)}.")
    automatic = (AxisType.Auto,) * len(names)  # XLA places collectives on such axes alone
    if isinstance(mesh, Mesh):
        mesh = Mesh(mesh.devices, names, axis_types=automatic)
    else:
        mesh = AbstractMesh(mesh.axis_sizes, names, axis_types=automatic)
    replicas = tuple(name for name in names if name != axis)
    return Sharding(mesh, axis, replicas, stage, scanned, keep)
