"""Arguments checked at the door, before anything is traced or allocated."""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxmem.ground.errors import JaxmemError

_LONGEST = 80  # characters of a value in a message
_MOST = 10  # arrays of a pytree in a message


def shown(value: Any) -> str:
    """A value as a message has it: arrays by dtype and shape, and not more than a line."""
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if isinstance(shape, tuple) and dtype is not None:
        return f"an array {dtype}{list(shape)}"
    text = " ".join(repr(value).split())
    if len(text) <= _LONGEST:
        return text
    return f"{text[: _LONGEST - 4]} ... of type {type(value).__qualname__}"


def shapes_of(tree: Any) -> str:
    """The arrays of a pytree, as a message has them: path, dtype and shape of each, ten at most."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    texts = [
        f"{jax.tree_util.keystr(path)} {shown(leaf).removeprefix('an array ')}".strip()
        for path, leaf in leaves[:_MOST]
    ]
    more = f" and {len(leaves) - _MOST} more" if len(leaves) > _MOST else ""
    return ", ".join(texts) + more if leaves else f"no arrays ({shown(tree)})"


def check_arrays(name: str, tree: Any, advice: str) -> None:
    """Raises `JaxmemError` at the first leaf of ``name`` that is no array or was deleted."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        at = name + jax.tree_util.keystr(path)
        if not is_numeric(leaf):
            raise JaxmemError(f"{at} is {shown(leaf)}, which is no array. {advice}")
        if is_deleted(leaf):
            raise JaxmemError(
                f"{at} was deleted: a step that it was given to took over its memory. Take the "
                "arrays of the state that the step returned, or give init a copy: "
                "init(jax.tree.map(jnp.copy, params))."
            )


def check_batch(batch: Any) -> None:
    """Raises `JaxmemError` for a batch with no examples, or with something that is no array."""
    leaves = jax.tree_util.tree_leaves_with_path(batch)
    for path, leaf in leaves:
        if not is_numeric(leaf):
            raise JaxmemError(
                f"batch{jax.tree_util.keystr(path)} is {shown(leaf)}, which is no array. Leave it "
                "out of the batch, or make it a number."
            )
    lengths = [jnp.shape(leaf)[0] for _, leaf in leaves if jnp.shape(leaf)]
    if lengths and not any(lengths):
        raise JaxmemError(
            f"The batch has no examples ({shapes_of(batch)}), and a mean over none is not a "
            "number. Leave this batch out."
        )


def is_deleted(leaf: Any) -> bool:
    """Whether it is an array whose memory was given away."""
    is_array = isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)
    return is_array and leaf.is_deleted()


def is_numeric(leaf: Any) -> bool:
    """Whether it is an array, real or abstract, or a number."""
    if isinstance(leaf, bool | int | float | complex):
        return True
    dtype = getattr(leaf, "dtype", None)
    if isinstance(dtype, np.dtype):
        return dtype.kind not in "OSU" and hasattr(leaf, "shape")
    return isinstance(leaf, jax.Array | jax.ShapeDtypeStruct)


def is_count(value: Any, least: int = 1) -> bool:
    """Whether it is an int, and no bool, of so many or more."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def check_count(name: str, argument: str, value: Any, least: int = 1) -> None:
    """Raises `JaxmemError` if the argument of ``name`` is no int of so many or more."""
    if not is_count(value, least):
        raise JaxmemError(f"{name} takes {argument}=, an int of {least} or more; got {value!r}.")


def check_seconds(name: str, argument: str, value: Any) -> None:
    """Raises `JaxmemError` if the argument of ``name`` is no number above 0."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (is_number and value > 0):
        raise JaxmemError(f"{name} takes {argument}=, seconds above 0; got {shown(value)}.")


def check_optimizer(optimizer: Any, name: str) -> optax.GradientTransformationExtraArgs:
    """The argument of ``name`` as an optax transformation whose update takes further arguments.
    Those that are in its signature are given to it, whatever its type says (`optax.MultiSteps` is
    no transformation with extra arguments, and hands all on); others are dropped. Raises
    `JaxmemError` if it is no optax transformation."""
    if not (callable(getattr(optimizer, "init", None)) and hasattr(optimizer, "update")):
        hint = " Pass its tx, the optax transformation in it." if hasattr(optimizer, "tx") else ""
        raise JaxmemError(
            f"{name} takes an optax.GradientTransformation, such as optax.adam(1e-3); got "
            f"{shown(optimizer)}.{hint}"
        )
    if isinstance(optimizer, optax.GradientTransformationExtraArgs):
        return optimizer
    takes_any, names = _further(optimizer.update)

    def update(updates, state, params=None, **extra):
        given = {one: extra[one] for one in extra if takes_any or one in names}
        return optimizer.update(updates, state, params, **given)

    return optax.GradientTransformationExtraArgs(optimizer.init, update)


def _further(update: Callable) -> tuple[bool, set[str]]:
    """Whether an optimizer's update takes any further argument by name, and those that it names."""
    try:
        parameters = list(inspect.signature(update).parameters.values())
    except (TypeError, ValueError):  # it has none that can be read
        return False, set()
    kinds = [one.kind for one in parameters]
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    named = {one.name for at, one in enumerate(parameters) if at > 2 and one.kind in by_name}
    # Those behind a star are further ones wherever they stand.
    named |= {one.name for one in parameters if one.kind is inspect.Parameter.KEYWORD_ONLY}
    return inspect.Parameter.VAR_KEYWORD in kinds, named


def check_callable(fun: Any, name: str) -> None:
    """Raises `JaxmemError` if ``fun``, the argument of ``name``, is no function."""
    if not callable(fun):
        raise JaxmemError(f"{name} takes a function of arrays; got {shown(fun)}.")


@contextlib.contextmanager
def note_call(called: str, fun: Callable, args: tuple, kwargs: dict) -> Iterator[None]:
    """Adds to what a user's function raises, while it is traced, what it was given. ``called`` is
    its name. Where one function calls another, the inner one's note stands."""
    start = "jaxmem: while tracing "
    try:
        yield
    except JaxmemError:
        raise
    except Exception as error:
        if not any(note.startswith(start) for note in getattr(error, "__notes__", ())):
            given = _named(fun, args, kwargs)
            shapes = "; ".join(f"{name}: {shapes_of(value)}" for name, value in given.items())
            error.add_note(f"{start}{called}({', '.join(given)}) with {shapes}.")
        raise


def name_of(fun: Callable) -> str:
    """A function as messages name it."""
    return getattr(fun, "__name__", type(fun).__name__)


def _named(fun: Callable, args: tuple, kwargs: dict) -> dict[str, Any]:
    """The arguments of a call by their names."""
    try:
        return dict(inspect.signature(fun).bind(*args, **kwargs).arguments)
    except (TypeError, ValueError):  # built in: what it takes is not known
        return {f"args[{number}]": value for number, value in enumerate(args)} | kwargs


def check_call(fun: Callable, args: tuple, kwargs: dict, name: str) -> None:
    """Raises `JaxmemError` if ``fun`` is no function, or cannot be called with these arguments."""
    check_callable(fun, name)
    try:
        signature = inspect.signature(fun)
    except (TypeError, ValueError):
        return  # built in: what it takes is not known
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        called = getattr(fun, "__qualname__", repr(fun))
        raise JaxmemError(
            f"{name} was given {called}{signature} and arguments that it does not take: {error}. "
            "Pass the arguments of one call, real or abstract."
        ) from error


def check_same(name: tuple[str, str], expected: Any, place: str, found: Any) -> None:
    """Raises `JaxmemError` at the first leaf of two trees that differs in path or shape.

    ``name`` is what the tree is, and where the expected one comes from.
    """
    wanted, given = (
        {
            jax.tree_util.keystr(path): leaf
            for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        }
        for tree in (expected, found)
    )
    for path in [*wanted, *given]:
        at = name[0] + path
        if path not in given:
            expected = _kind(wanted[path])
            raise JaxmemError(f"{at} is missing {place}; expected {expected}, as {name[1]}.")
        if path not in wanted:
            extra = _kind(given[path])
            raise JaxmemError(f"{at} is {extra} {place}; expected nothing there, as {name[1]}.")
        given_shape, wanted_shape = (list(jnp.shape(tree[path])) for tree in (given, wanted))
        if given_shape != wanted_shape:
            raise JaxmemError(
                f"{at} is {given_shape} {place} and {wanted_shape} {name[1]}. Both must have one "
                "structure and one shape for each array."
            )


def check_alike(
    name: tuple[str, str], expected: Any, place: str, found: Any, also: Callable | None = None
) -> None:
    """`check_same`, of what has no leaves and of dtypes too.

    A leaf that differs in dtype may have that of ``also()``, another such tree.
    """
    check_same(name, expected, place, found)
    if jax.tree.structure(expected) != jax.tree.structure(found):
        path, kind, found_kind = _difference("", expected, found)
        raise JaxmemError(
            f"{name[0]}{path} is {found_kind} {place} and {kind} {name[1]}. Both must have one "
            "structure."
        )
    others = None
    leaves = zip(jax.tree_util.tree_leaves_with_path(expected), jax.tree.leaves(found), strict=True)
    for at, ((path, wanted), leaf) in enumerate(leaves):
        given, meant = (getattr(value, "dtype", None) for value in (leaf, wanted))
        if given == meant:
            continue
        if also is not None and others is None:
            others = jax.tree.leaves(also())
        if others is None or given != others[at].dtype:
            raise JaxmemError(
                f"{name[0]}{jax.tree_util.keystr(path)} is {given} {place} and {meant} {name[1]}. "
                "Cast it, if it is to be the same."
            )


def check_state(
    init: Callable, update: Callable, updates: Any, state: Any, params: Any, extra: dict[str, Any]
) -> None:
    """Raises `JaxmemError` if ``state`` is not that of the optimizer of ``init`` and ``update``."""
    like = jax.eval_shape(init, updates if params is None else params)

    def after():
        if params is None:  # nobody knows of what dtype they were at init
            return state
        # Gradients wider than the parameters make the state wider at the first update.
        return jax.eval_shape(update, updates, like, params, **extra)[1]

    name = ("optimizer state", "by this optimizer's init")
    check_alike(name, like, "in this call", state, after)


def _shapes(tree: Any) -> dict[str, str]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): str(list(jnp.shape(leaf))) for path, leaf in leaves}


def _kind(leaf: Any) -> str:
    """``an int32 scalar``, ``a float32[4, 3] array``."""
    dtype, shape = jnp.result_type(leaf), list(jnp.shape(leaf))
    article = "an" if str(dtype)[0] in "aeiou" else "a"
    return f"{article} {dtype}{shape} array" if shape else f"{article} {dtype} scalar"


def _difference(path: str, *trees: Any) -> tuple[str, str, str]:
    """The path of the first node in which two trees differ, and what it is in each."""
    levels = [
        jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda node, tree=tree: node is not tree)
        for tree in trees
    ]
    if type(trees[0]) is type(trees[1]):
        for (key, one), (_, other) in zip(*levels, strict=False):
            if jax.tree.structure(one) != jax.tree.structure(other):
                return _difference(path + jax.tree_util.keystr(key), one, other)
    first, second = (
        f"{type(tree).__name__} of {len(level)}" for tree, level in zip(trees, levels, strict=True)
    )
    return path, first, second
