"""What the arguments of a step are: parameters, optimizer state, model state or batch.

The rule, first match wins, from the outside of an argument to the leaf:

1. a container whose class optax, or jaxmem for its optimizers, defines, a variable of a `flax.nnx`
   optimizer, or the name ``opt_state``, ``optimizer_state``, ``optimizer``, ``opt``: optimizer
   state;
2. a `flax.nnx.Param`, or the name ``params``, ``parameters``, ``weights``: parameters;
3. another `flax.nnx.Variable`, or the name ``batch_stats``, ``model_state``, ``cache``, ``rng``,
   ``rngs``, ``key``, ``step``: model state;
4. the name ``batch``, ``inputs``, ``images``, ``labels``, ``targets``, ``tokens``, ``x``, ``y``:
   batch;
5. an array of floats whose shape and dtype one of the results has (its update or its gradient):
   parameters; everything else: batch.
"""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import jax
from jax.tree_util import keystr

from jaxmem.jaxprs.operands import is_array

_NAMES = {
    "optimizer state": ("opt_state", "optimizer_state", "optimizer", "opt"),
    "parameters": ("params", "parameters", "weights"),
    "model state": ("batch_stats", "model_state", "cache", "rng", "rngs", "key", "step"),
    "batch": ("batch", "inputs", "images", "labels", "targets", "tokens", "x", "y"),
}
_KIND_OF_NAME = {name: kind for kind, names in _NAMES.items() for name in names}
_ORDER = tuple(_NAMES)


@dataclasses.dataclass(frozen=True, slots=True)
class Argument:
    """One array among the arguments: its path (``state.params['Dense_0']['kernel']``), what it is,
    its module (``Dense_0``), and what of the call it belongs to (``state.params``)."""

    path: str
    kind: str
    module: str
    group: str


def describe_arguments(fun: Callable, args: tuple, kwargs: dict, results) -> list[Argument]:
    """The arrays of a call in order; ``results`` are the abstract results of the step."""
    names = argument_names(fun, args, kwargs)
    like = {(leaf.shape, str(leaf.dtype)) for leaf in results if _is_float(leaf)}
    described = []
    for position, value in [*enumerate(args), *kwargs.items()]:
        name = names[position]
        for keys, leaf in jax.tree_util.tree_flatten_with_path(value)[0]:
            classes, words = _walk(value, keys)
            words = [position if isinstance(position, str) else name, *words]
            found = classes | {_KIND_OF_NAME[word] for word in words if word in _KIND_OF_NAME}
            if found:
                kind = min(found, key=_ORDER.index)
            elif _is_float(leaf) and (leaf.shape, str(leaf.dtype)) in like:
                kind = "parameters"
            else:
                kind = "batch"
            fields = _leading_fields(keys)
            module = _module(words, keys) if kind != "batch" else ""
            described.append(Argument(name + keystr(keys), kind, module, name + fields))
    return described


def argument_names(fun: Callable, args: tuple, kwargs: dict) -> dict[int | str, str]:
    """The names of a call's arguments by position or keyword, as JAX tells them: ``batch``,
    ``args[0]`` of a ``*args``, ``kwargs['batch']`` of a ``**kwargs``."""
    try:
        parameters = list(inspect.signature(fun).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    named = {
        one.name for one in parameters if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
    }
    places = [
        one.name
        for one in parameters
        if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)
    ]
    more = next((one.name for one in parameters if one.kind is one.VAR_POSITIONAL), "args")
    extra = next((one.name for one in parameters if one.kind is one.VAR_KEYWORD), "kwargs")
    names: dict[int | str, str] = {
        number: places[number] if number < len(places) else f"{more}[{number - len(places)}]"
        for number in range(len(args))
    }
    return names | {key: key if key in named else f"{extra}[{key!r}]" for key in kwargs}


def argument_paths(fun: Callable, args: tuple, kwargs: dict) -> list[str]:
    """The arrays of a call by path, in order: ``params['w']``."""
    names = argument_names(fun, args, kwargs)
    return [
        names[key] + keystr(keys)
        for key, value in [*enumerate(args), *sorted(kwargs.items())]
        for keys, leaf in jax.tree_util.tree_flatten_with_path(value)[0]
        if is_array(leaf)
    ]


def _is_float(leaf) -> bool:
    return hasattr(leaf, "dtype") and jax.numpy.issubdtype(leaf.dtype, jax.numpy.inexact)


def _walk(value: Any, keys: tuple) -> tuple[set[str], list[str]]:
    """The kinds that the containers on the way tell, and the names on the way."""
    kinds: set[str] = set()
    words = []
    for key in (*keys, None):
        kind = _kind_of_container(value)
        if kind:
            kinds.add(kind)
        if key is None:
            break
        part = getattr(key, "name", getattr(key, "key", getattr(key, "idx", None)))
        words.append(str(part))
        try:
            value = getattr(value, key.name) if hasattr(key, "name") else value[part]
        except (AttributeError, KeyError, IndexError, TypeError):
            value = None
    return kinds, words


def _kind_of_container(value: Any) -> str | None:
    made_by = type(value).__module__.partition(".")[0]
    names = {base.__name__ for base in type(value).__mro__}
    if made_by == "optax" or (
        made_by == "jaxmem" and isinstance(value, tuple) and "TrainState" not in names
    ):
        return "optimizer state"
    if made_by == "flax" or "Variable" in names:
        if names & {"OptState", "OptVariable", "OptArray"}:
            return "optimizer state"
        if "Param" in names:
            return "parameters"
        if "Variable" in names:
            return "model state"
    return None


def _leading_fields(keys: tuple) -> str:
    """The fields before the first index or key: ``.opt_state`` of ``.opt_state[0].mu['w']``."""
    text = ""
    for key in keys:
        if not hasattr(key, "name"):
            break
        text += f".{key.name}"
    return text


def _module(words: list[str], keys: tuple) -> str:
    """``Block_0/Conv_1`` of ``state.params['Block_0']['Conv_1']['kernel']``: the keys after the
    last field, less the leaf's own name."""
    if keys and getattr(keys[-1], "name", "") == "value":  # of a flax.nnx.Variable
        keys, words = keys[:-1], words[:-1]
    after = 0
    for number, key in enumerate(keys, 1):
        if hasattr(key, "name"):
            after = number
    inner = [str(getattr(key, "key", getattr(key, "idx", ""))) for key in keys[after:]]
    if keys and hasattr(keys[-1], "key") and len(inner) > 1:
        inner = inner[:-1]
    inner = [word for word in inner if word not in _KIND_OF_NAME]
    if all(word.isdigit() for word in inner):  # a list, say: told by the name before it
        inner = [words[len(words) - len(inner) - 1], *inner] if inner else words[-1:]
    return "/".join(inner)
