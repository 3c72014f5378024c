"""Arrays in their places on a mesh, and what each device has of them."""

import math
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jaxmem import jaxprs
from jaxmem.ground.bytes import format_bytes
from jaxmem.levers.splitting import names_of
from jaxmem.targets import HOST_KIND


def placed(mesh: Mesh | AbstractMesh, tree: Any, specs: Any = None) -> Any:
    """A tree on a mesh, each leaf as its spec says; None: with a copy on every device. Abstract
    leaves get the sharding, and what is in host memory stays there."""

    def put(leaf, spec):
        on_host = jaxprs.memory_space(leaf) is jaxprs.HOST
        kind = HOST_KIND if on_host else None
        sharding = NamedSharding(mesh, spec, memory_kind=kind)
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
        leaf = jax.device_put(leaf, sharding)
        return jax.device_put(leaf, jaxprs.HOST) if on_host else leaf

    if specs is None:
        specs = jax.tree.map(lambda _: PartitionSpec(), tree)
    return jax.tree.map(put, tree, specs)


def on_automatic_axes(mesh: Mesh | AbstractMesh, tree: Any) -> Any:
    """A tree whose arrays on a mesh of explicit axes are on this one, which has the same axes
    without that: no array moves."""

    def put(leaf):
        own = getattr(leaf, "sharding", None)
        if isinstance(leaf, jax.core.Tracer) or not isinstance(own, NamedSharding):
            return leaf
        if own.mesh.shape != mesh.shape or AxisType.Explicit not in own.mesh.axis_types:
            return leaf
        return placed(mesh, leaf, own.spec)

    return jax.tree.map(put, tree)


def bytes_table(
    mesh: Mesh | AbstractMesh, trees: dict[str, tuple[Any, Any]], spread: dict[str, bool]
) -> str:
    """Bytes of trees with their specs, whole and on each device; of what is ``spread``, how many
    arrays are on every device nevertheless."""
    lines = [f"{'':12}{'whole':>14}{'each device':>14}"]
    copies = []
    for name, (tree, specs) in trees.items():
        whole = each = 0
        placed_as = jax.tree.leaves(specs, is_leaf=lambda one: isinstance(one, PartitionSpec))
        for leaf, spec in zip(jax.tree.leaves(tree), placed_as, strict=True):
            size = math.prod(leaf.shape) * leaf.dtype.itemsize
            parts = math.prod(mesh.shape[axis] for part in spec for axis in names_of(part))
            if parts == 1 and spread[name] and size:
                copies.append(size)
            whole, each = whole + size, each + size // parts
        lines.append(f"{name:12}{format_bytes(whole):>14}{format_bytes(each):>14}")
    lines.append(f"{len(copies)} small arrays on every device: {format_bytes(sum(copies))}")
    return "\n".join(lines)
