"""Where arrays live: memory spaces, devices and meshes."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import (
    AbstractMesh,
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
    SingleDeviceSharding,
)

from jaxmem.ground.errors import JaxmemError, OffloadError
from jaxmem.jaxprs import internals
from jaxmem.jaxprs.operands import is_extended
from jaxmem.targets.memories import HOST_KIND, HOST_KINDS

HOST = jax.memory.Space.Host
DEVICE = jax.memory.Space.Device


def memory_kinds() -> list[str]:
    """The kinds of memory that the attached devices address."""
    return [memory.kind for memory in jax.devices()[0].addressable_memories()]


def memory_space(value) -> Any:
    """`HOST` or `DEVICE`: where an array, a tracer or an abstract value lives."""
    if isinstance(value, jax.ShapeDtypeStruct):
        kind = getattr(value.sharding, "memory_kind", None)
        space = getattr(value, "_memory_space", None)  # jax 0.12
        return HOST if space is HOST or kind in HOST_KINDS else DEVICE
    aval = jax.typeof(value) if isinstance(value, jax.Array) else value
    return getattr(aval, "memory_space", DEVICE)


def is_committed(value) -> bool:
    """Whether an array is bound to the device or mesh it is on."""
    return (
        isinstance(value, jax.Array)
        and not isinstance(value, jax.core.Tracer)
        and getattr(value, "committed", False)
    )


def memory_of(value) -> Any:
    """Where the first piece of an array lies; None: it has none here, or is no array of JAX's."""
    if not isinstance(value, jax.Array) or isinstance(value, jax.core.Tracer):
        return None
    if value.is_deleted() or not value.size or not value.addressable_shards:
        return None
    if is_extended(value):
        value = jax.random.key_data(value)
    piece = value.addressable_shards[0].data
    return piece.sharding, piece.unsafe_buffer_pointer()


def replicated_like(sharding: Sharding) -> Sharding:
    """A sharding with a copy on each device of another."""
    if isinstance(sharding, NamedSharding):
        return NamedSharding(sharding.mesh, PartitionSpec())
    (device,) = sharding.device_set
    return SingleDeviceSharding(device)


def canonical_sharding(sharding: Sharding) -> Sharding:
    """A sharding as XLA's programs return it: without what says that an axis is whole."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    parts: list[Any] = []
    for part in sharding.spec:
        axes = part if isinstance(part, tuple) else (part,)
        wide = tuple(axis for axis in axes if axis is not None and sharding.mesh.shape[axis] > 1)
        parts.append(wide if len(wide) > 1 else wide[0] if wide else None)
    while parts and parts[-1] is None:
        parts.pop()
    return sharding.update(spec=PartitionSpec(*parts))


def match_varying_axes(value: jax.Array, *others: Any) -> jax.Array:
    """The value, varying over the mesh axes of `jax.shard_map` that any of the others (arrays or
    abstract values) varies over: the carry of a loop does not begin to vary in it."""
    axes = frozenset().union(*(_aval(x).mat.varying for x in jax.tree.leaves(others)))
    axes -= jax.typeof(value).mat.varying
    return jax.lax.pcast(value, tuple(sorted(axes)), to="varying") if axes else value


def of_shape(aval, shape: tuple[int, ...]) -> Any:
    """An abstract value of another shape, varying over the same axes of `jax.shard_map`, and cut
    over no explicit axis of a mesh."""
    return _of_spec(aval, shape, [None] * len(shape))


def element_of(aval) -> Any:
    """The abstract value of one element of a stack, cut over the same axes of a mesh."""
    return _of_spec(aval, aval.shape[1:], aval.sharding.spec[1:])


def stack_of(aval, count: int) -> Any:
    """The abstract value of a stack of so many elements, cut over the same axes of a mesh."""
    return _of_spec(aval, (count, *aval.shape), (None, *aval.sharding.spec))


def _of_spec(aval, shape: Sequence[int], spec: Sequence[Any]) -> Any:
    sharding = aval.sharding.update(spec=PartitionSpec(*spec))
    return aval.update(shape=tuple(shape), sharding=sharding)


def filled(like, number: int = 0) -> jax.Array:
    """An array full of a number, of the type and in the place of an abstract value: in the same
    memory, cut over the same axes of a mesh, varying over the same axes of `jax.shard_map`."""
    one = jnp.full((), number, like.dtype)
    if memory_space(like) is HOST:  # the number: of the whole XLA would make all on the device
        one = jax.device_put(one, HOST)
    aval = _aval(like)
    return match_varying_axes(
        jax.lax.broadcast(one, aval.shape, out_sharding=_explicit(aval)), aval
    )


def match_weak_type(aval: Any, value: Any) -> Any:
    """A value, of a weak type where its abstract value is: JAX makes those of custom rules strong,
    and what is computed of them would have another dtype."""
    if not getattr(aval, "weak_type", False) or jax.typeof(value).weak_type:
        return value
    return internals.primitives.convert_element_type_p.bind(
        value, new_dtype=aval.dtype, weak_type=True, sharding=None
    )


def struct_of(aval) -> jax.ShapeDtypeStruct:
    """The shape, the dtype and the explicit axes of a mesh of an abstract value."""
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=_explicit(aval))


def in_automatic_axes(fun: Callable, likes: Sequence[Any]) -> Callable:
    """A function of arrays, inside of which no axis of a mesh is explicit: XLA spreads what its
    operations make, which JAX would not know how to. Its results, a list, are cut as the ``likes``
    are. Without a mesh of explicit axes it is the function itself."""

    def run(*arrays):
        if not any(has_explicit_axes(_aval(x)) for x in jax.tree.leaves(arrays)):
            return fun(*arrays)
        specs = [_aval(like).sharding.spec for like in likes]
        return jax.sharding.auto_axes(fun, out_sharding=specs)(*arrays)

    return run


@contextlib.contextmanager
def mesh_in_force(mesh: Mesh | AbstractMesh | None) -> Iterator[None]:
    """In which a mesh is in force, or none, whatever `jax.set_mesh` was given."""
    real = mesh if isinstance(mesh, Mesh) else Mesh(np.empty((), dtype=object), ())
    with contextlib.ExitStack() as stack:
        # Inside of a trace, where devices are not known, it raises.
        with contextlib.suppress(ValueError):
            stack.enter_context(jax.set_mesh(real))
        abstract = mesh if isinstance(mesh, AbstractMesh) else real.abstract_mesh
        stack.enter_context(jax.sharding.use_abstract_mesh(abstract))
        yield


def _aval(value) -> Any:
    has_one = isinstance(value, jax.Array | jax.ShapeDtypeStruct | np.ndarray)
    return jax.typeof(value) if has_one else value


def has_explicit_axes(aval) -> bool:
    """Whether an abstract value is on a mesh that has some."""
    return AxisType.Explicit in aval.sharding.mesh.axis_types


def _explicit(aval) -> Sharding | None:
    """Its sharding, as far as that is explicit; None: it is not."""
    return aval.sharding if any(aval.sharding.spec) else None


def abstract(value) -> Any:
    """A leaf as a ShapeDtypeStruct that keeps its sharding and its memory kind.

    jax 0.10 forgets the memory kind of a single-device sharding on a ShapeDtypeStruct, so what
    is on the host is given a mesh of one device.
    """
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        return value
    sharding = None
    if isinstance(value, jax.ShapeDtypeStruct) or is_committed(value):
        sharding = value.sharding
    on_host = memory_space(value) is HOST or getattr(sharding, "memory_kind", "") in HOST_KINDS
    if on_host and not isinstance(sharding, NamedSharding):
        sharding = host_sharding()
    weak_type = getattr(value, "weak_type", False)
    return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding, weak_type=weak_type)


def host_sharding() -> NamedSharding:
    """Host memory of the first attached device, in a form that tracing keeps."""
    mesh = jax.sharding.Mesh(jax.devices()[:1], ("host",))
    return NamedSharding(mesh, PartitionSpec(), memory_kind=HOST_KIND)


def spec_of(sharding) -> tuple[Any, ...]:
    """The axes of the mesh for each axis of an array; ('?',) where they are not known."""
    return tuple(sharding.spec) if isinstance(sharding, NamedSharding) else ("?",)


def on_several_devices(value) -> bool:
    """Whether an array or tracer is known to lie on a mesh of more than one device."""
    mesh = getattr(getattr(jax.typeof(value), "sharding", None), "mesh", None)
    return getattr(mesh, "size", 1) > 1


def check_on_device(name: str, state: Any, at: str = "") -> None:
    """Raises `OffloadError` if the state that ``name`` was to change is in host memory."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        if memory_space(leaf) is HOST:
            raise OffloadError(
                f"{name} was given an optimizer whose state{at}{jax.tree_util.keystr(path)} is in "
                f"host memory. jaxmem.offload goes outside: jaxmem.offload({name}(optimizer))."
            )


def check_devices(**trees: Any) -> None:
    """Raises `JaxmemError` if arrays that go into one program are bound to different devices."""
    places = [
        (name + jax.tree_util.keystr(path), leaf.sharding.device_set)
        for name, tree in trees.items()
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        if is_committed(leaf)
    ]
    for name, devices in places:
        first, others = places[0]
        if devices != others:
            raise JaxmemError(
                f"{first} is on {_devices(others)} and {name} on {_devices(devices)}, and a step "
                "runs where all of its arrays are. Put both in one place, with "
                "jax.device_put(batch, device), or let "
                "jaxmem.train_step(..., sharding=jaxmem.shard(mesh)) spread them over several "
                "devices."
            )


def _devices(devices: set[jax.Device]) -> str:
    first = min(devices, key=lambda device: device.id)
    more = f" and {len(devices) - 1} more" if len(devices) > 1 else ""
    return f"{first.platform}:{first.id}{more}"
