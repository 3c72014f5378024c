"""Functions that take Flax modules as functions of arrays, and modules with a transformed call.

Flax is not imported here: whoever passes a module has imported it.
"""

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from jaxmem import jaxprs
from jaxmem.ground.checks import name_of, note_call
from jaxmem.ground.errors import JaxmemError

_TAG = "jaxmem"  # of Flax's records of what a call changes in the modules that it is given

Evaluate = Callable[[Callable, list[Any]], Any]
"""Takes a function of arrays and the arrays, and returns what the function does."""


@dataclasses.dataclass(frozen=True)
class ArrayCall:
    """A call as a function of its arrays alone.

    Attributes:
        fun: takes the arrays. Returns what the called function does, and the state of the nnx
            modules afterwards if there are any.
        leaves: the arrays of the arguments, in order. Other leaves are constants of ``fun``.
        owners: the number of the positional argument that each of them belongs to; None: a keyword
            argument, or the module that a method is bound to.
        value: what the called function returns, of the results of ``fun``.
        publish: the same, and what the function changed is written to the modules.
    """

    fun: Callable
    leaves: list[Any]
    owners: list[int | None]
    value: Callable[[Any], Any] = lambda results: results
    publish: Callable[[Any], Any] = lambda results: results


def on_arrays(evaluate: Evaluate, fun: Callable, args: tuple, kwargs: dict) -> Any:
    """``fun(*args, **kwargs)``, of which ``evaluate`` is given the function of arrays.

    ``fun`` may take nnx modules and change them, or be a method of a linen module (or a function
    that takes one first, as for ``nn.remat``).
    """
    linen = sys.modules.get("flax.linen")
    if linen and args and isinstance(args[0], linen.Module) and args[0].scope is not None:
        return _lifted(evaluate, fun)(*args, **kwargs)
    with note_call(name_of(fun), fun, args, kwargs), array_call(fun, args, kwargs) as call:
        return call.publish(evaluate(call.fun, call.leaves))


@contextlib.contextmanager
def array_call(fun: Callable, args: tuple, kwargs: dict) -> Iterator[ArrayCall]:
    """A call as a function of arrays, for as long as the context lasts."""
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        yield _array_call(fun, args, kwargs)
        return
    kinds = (nnx.Pytree, nnx.Variable)

    def is_node(value: Any) -> bool:
        return isinstance(value, kinds)

    owner = getattr(fun, "__self__", fun)
    bound: tuple[Any, ...] = ()
    if is_node(owner):  # what a method changes of its module is to be seen
        bound = (owner,)
        fun = getattr(fun, "__func__", type(owner).__call__)
    if not bound and not any(map(is_node, jax.tree.leaves((args, kwargs), is_leaf=is_node))):
        yield _array_call(fun, args, kwargs)
        return

    def pure(*args, **kwargs):
        args, kwargs = nnx.from_tree((args, kwargs), ctxtag=_TAG, is_inner=True)
        nodes = list(filter(is_node, jax.tree.leaves((args, kwargs), is_leaf=is_node)))
        before = list(map(_contents, nodes))
        results = fun(*args, **kwargs)
        # What has not changed stays as it is: it may belong to a trace that does not let it change.
        changed = [
            node if _differ(old, _contents(node)) else None
            for node, old in zip(nodes, before, strict=True)
        ]
        return nnx.to_tree((results, changed), ctxtag=_TAG)

    def publish(results):
        return nnx.from_tree(results, ctxtag=_TAG, is_inner=False)[0]

    with nnx.update_context(_TAG):
        args, kwargs = nnx.to_tree(((*bound, *args), kwargs), ctxtag=_TAG)
        call = _array_call(pure, args, kwargs, first=-len(bound))
        yield dataclasses.replace(call, value=lambda results: results[0], publish=publish)


def _contents(node: Any) -> tuple[Any, list[Any]]:
    """The structure of an nnx module, and its arrays as they are now."""
    definition, state = sys.modules["flax.nnx"].split(node)
    return definition, jax.tree.leaves(state)


def _differ(before: tuple[Any, list[Any]], after: tuple[Any, list[Any]]) -> bool:
    """Whether the contents of a module are others, in structure or in any array."""
    (definition, arrays), (other, others) = before, after
    pairs = zip(arrays, others, strict=False)
    return definition != other or any(old is not new for old, new in pairs)


def _array_call(fun: Callable, args: Sequence[Any], kwargs: dict, first: int = 0) -> ArrayCall:
    leaves, call = jaxprs.split_arrays(fun, tuple(args), kwargs)
    owners: list[int | None] = [
        number if number >= 0 else None
        for number, arg in enumerate(args, first)
        for leaf in jax.tree.leaves(arg)
        if jaxprs.is_array(leaf)
    ]
    return ArrayCall(call, leaves, owners + [None] * (len(leaves) - len(owners)))


def _lifted(evaluate: Evaluate, fun: Callable) -> Callable:
    """A method of a linen module, whose scope is taken apart into arrays and put together again."""
    from flax.core import lift
    from flax.linen.transforms import lift_transform

    def transform(scoped):
        def inner(scope_of, repack, variables, rngs, /, *args, **kwargs):
            def pure(variables, rngs, /, *args, **kwargs):
                scope = scope_of(variables, rngs)
                return scoped(scope, *args, **kwargs), repack(scope)

            return on_arrays(evaluate, pure, (variables, rngs, *args), kwargs)

        return lift.pack(inner, (True,), (True,), (True,), name="jaxmem", enable_kwargs=True)

    return lift_transform(transform, fun)


# ---- modules


def is_module(thing: Any) -> bool:
    """Whether it is a linen or an nnx module, the class of one, or a `functools.partial` of a
    class."""
    linen, nnx = sys.modules.get("flax.linen"), sys.modules.get("flax.nnx")
    kind = thing.func if isinstance(thing, functools.partial) else thing
    if not isinstance(kind, type):
        kind = type(thing)
    return bool(
        (linen and issubclass(kind, linen.Module)) or (nnx and issubclass(kind, nnx.Module))
    )


def transform_module(thing: Any, transform: Callable[[Callable], Callable]) -> Any:
    """The same kind of thing, with its ``__call__`` under ``transform``.

    Raises:
        JaxmemError: a linen module that is no class, or a module without ``__call__``.
    """
    if isinstance(thing, functools.partial):
        kind = transform_module(thing.func, transform)
        return functools.partial(kind, *thing.args, **thing.keywords)
    if isinstance(thing, type):
        return _subclass(thing, transform)
    linen = sys.modules.get("flax.linen")
    if linen and isinstance(thing, linen.Module):
        name = type(thing).__name__
        raise JaxmemError(
            f"jaxmem.remat takes the class of a Flax linen module; got an instance of {name}. "
            f"Write jaxmem.remat({name})(...), with the fields in the second call: a linen module "
            "that exists has its place in the model already."
        )
    # Shares its variables.
    instance: Any = object.__new__(_subclass(type(thing), transform))
    vars(instance).update(vars(thing))
    return instance


def _subclass(kind: type, transform: Callable[[Callable], Callable]) -> type:
    if not any("__call__" in vars(base) for base in kind.__mro__):  # a class itself has one
        raise JaxmemError(
            f"jaxmem.remat plans the __call__ of a module, and {kind.__name__} has none. Decorate "
            "its methods with @jaxmem.remat instead."
        )
    # Its own name: Flax names parameters by it, and those of older checkpoints have it.
    names = ("__module__", "__qualname__", "__doc__")
    body = {name: getattr(kind, name) for name in names}
    return type(kind)(kind.__name__, (kind,), {**body, "__call__": transform(kind.__call__)})
