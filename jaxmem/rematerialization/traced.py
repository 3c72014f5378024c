"""A function with its arguments, traced as a program that can be planned."""

import copy
import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem import jaxprs
from jaxmem.frameworks.modules import array_call, is_module
from jaxmem.ground.checks import name_of, note_call, shapes_of
from jaxmem.ground.errors import JaxmemError, PlanError
from jaxmem.ground.garbage import uncollected
from jaxmem.ground.words import pluralize
from jaxmem.program import (
    Become,
    InputGradients,
    Program,
    read_program,
    size_of,
    with_gradients,
)
from jaxmem.targets import LocalDevice, Target


class TracedFunction:
    """A function, its arguments, and the program that it is on one of the devices that they are on;
    the user's own regions are written in place, unless ``open_regions`` is false.
    ``gradient_bytes`` are those of one device in the end, of each differentiated array, where it
    is known how gradients are spread; ``gradients_become`` as of `InputGradients`; ``target`` is
    what it is traced for."""

    @uncollected()
    def __init__(
        self,
        fun: Callable,
        args: tuple,
        kwargs: dict,
        argnums: int | Sequence[int],
        has_aux: bool = False,
        open_regions: bool = True,
        gradient_bytes: Sequence[int] | None = None,
        gradients_become: Become = "results",
        target: Target | LocalDevice | None = None,
    ):
        self.has_aux, self._target = has_aux, target
        self._spreads: dict[int, jaxprs.Shardings] = {}  # each keeps its jaxpr, and its id
        wanted = _differentiated(argnums, args)
        args = tuple(
            _numbers_as_arrays(one) if at in wanted else one for at, one in enumerate(args)
        )
        with array_call(fun, args, kwargs) as call:
            self.leaves, self.value = call.leaves, call.value
            with note_call(name_of(fun), fun, args, kwargs), jaxprs.in_place_of_attached(target):
                self.closed, self.out_tree = jaxprs.traced_jaxpr(call.fun, call.leaves)
        self.flat = flattened(self.closed, self.out_tree, open_regions)
        # Leaves of differentiated arguments, as numbers of inputs: constants come first.
        self.wanted = [at for at, owner in enumerate(call.owners) if owner in wanted]
        with jaxprs.in_place_of_attached(target):
            jaxprs.check_rules(self.closed, self.wanted)
        first = self.flat.input_count - len(call.leaves)
        self._differentiated = frozenset(first + at for at in self.wanted)
        self._returned = gradient_bytes is None
        self._gradients = (
            InputGradients(self._propagated_gradients())
            if gradient_bytes is None
            else InputGradients(self._late_gradients(gradient_bytes), gradients_become)
        )
        self.program = self.read(self.flat)

    def with_own_regions(self) -> "TracedFunction":
        """The function with the user's own regions as they are."""
        kept = copy.copy(self)
        kept.flat = flattened(self.closed, self.out_tree, open_regions=False)
        kept.program = kept.read(kept.flat)
        return kept

    @functools.cached_property
    def shardings(self) -> list[Any]:
        """Those of the arrays that the function takes; None: not known, or on one device."""
        return [getattr(jaxprs.abstract(leaf), "sharding", None) for leaf in self.leaves]

    def shards(self, flat: jaxprs.FlatJaxpr) -> jaxprs.Shardings:
        """How the function, or what was made of it, is spread over the devices that its arguments
        are on."""
        found = self._spreads.get(id(flat))
        if found is None:
            found = self._spreads[id(flat)] = jaxprs.propagate_shardings(flat, self.shardings)
        return found

    def read(self, flat: jaxprs.FlatJaxpr) -> Program:
        """The program of the function, or of what was made of it."""
        with jaxprs.in_place_of_attached(self._target):  # derivatives of the user's own are traced
            program = read_program(flat, self._differentiated, shards=self.shards(flat))
        gradients = self._gradients
        if not self._returned:  # zeros are parts of the kernels that read them
            sizes = dict.fromkeys(self._differentiated - with_gradients(program), 0)
            gradients = dataclasses.replace(gradients, sizes={**gradients.sizes, **sizes})
        return dataclasses.replace(program, input_gradients=gradients)

    def _propagated_gradients(self) -> dict[int, int]:
        """Bytes of each gradient that one device has where nobody says how they are spread; on one
        device they are those of what is differentiated."""
        if self.shards(self.flat).mesh is None:
            return {}
        differentiable = [
            at
            for at in sorted(self._differentiated)
            if jnp.issubdtype(self.flat.avals[at].dtype, jnp.inexact)
        ]
        pieces = jaxprs.gradient_shards(self.flat, self.shardings, differentiable)
        return dict(zip(differentiable, map(size_of, pieces), strict=True))

    def _late_gradients(self, spread: Sequence[int]) -> dict[int, int]:
        """Bytes of each gradient that one device has if they are spread so in the end. Those of
        what a loop slices are, turn by turn; of others XLA combines several to one sum, as late as
        may be, and until then there is as much of each as of what it is the gradient of."""
        turns = {
            value
            for step in self.flat.steps
            if step.primitive == "scan"
            for value in step.inputs[jaxprs.loop_of(step.equation).carry.stop :]
            if isinstance(value, int)
        }
        pieces = self.shards(self.flat)
        return {
            value: size if value in turns else size_of(pieces.aval(value))
            for value, size in zip(sorted(self._differentiated), spread, strict=True)
        }

    def check_loss(self, name: str, scalar: bool) -> None:
        """Raises `PlanError` if nothing that the function takes or returns can be differentiated,
        or if it is to be a loss and is no floating-point scalar."""
        given = [self.flat.avals[at].dtype for at in sorted(self._differentiated)]
        if not any(jnp.issubdtype(dtype, jnp.inexact) for dtype in given):
            found = ", ".join(map(str, given[:4])) or "they hold no arrays"
            raise PlanError(
                f"{name} plans what a backward pass keeps, and argnums= names arguments that have "
                f"no derivatives ({found}). Name those that gradients are taken by."
            )
        outputs = jax.tree.unflatten(self.flat.out_tree, map(self.flat.aval, self.flat.outputs))
        outputs = self.value(outputs)
        if self.has_aux:
            outputs = _loss_of(outputs, name)
        leaves = jax.tree.leaves(outputs)
        floating = [leaf for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.inexact)]
        found = ", ".join(f"{leaf.dtype}{list(leaf.shape)}" for leaf in leaves[:4]) or "nothing"
        if not floating:
            raise PlanError(
                f"{name} plans what a backward pass keeps, and there is none of a function that "
                f"returns {found}. Pass one that returns floating-point values."
            )
        real = jnp.issubdtype(leaves[0].dtype, jnp.floating)
        if scalar and (len(leaves) > 1 or leaves[0].shape or not real):
            raise PlanError(
                f"With a target {name} compiles the value and gradient of a loss, a floating-point "
                f"scalar, and the function returns {found}. Return its mean or its sum, a real one "
                "(has_aux=True if there is more beside it), or leave target out to have projected "
                "bytes."
            )

    @property
    def differentiable(self) -> list[int]:
        """The numbers of the array leaves that gradients are taken of."""
        return [at for at in self.wanted if jnp.issubdtype(self.leaves[at].dtype, jnp.inexact)]

    def differentiated(self, fun: Callable) -> Callable:
        """The value and gradient of a function of the array leaves."""
        return jax.value_and_grad(fun, self.differentiable, self.has_aux)


def _loss_of(results: Any, name: str) -> Any:
    """The loss of a function with ``has_aux=True``."""
    several = isinstance(results, tuple | list)
    if not several or len(results) != 2:
        count = f"{pluralize(len(results), 'value')}, " if several else ""
        raise PlanError(
            f"{name}(..., has_aux=True) takes a function that returns (loss, aux), and it returns "
            f"{count}{shapes_of(results)}. Return a pair, or leave has_aux out."
        )
    return results[0]


def flattened(closed: Any, out_tree: Any, open_regions: bool) -> jaxprs.FlatJaxpr:
    """A traced function as plans are made of it and emitted: what it prints is set apart, and the
    user's own regions are written in place, or stay.

    Raises:
        PlanError: it has side effects, or random bits that would differ the second time.
    """
    flat = jaxprs.flatten_jaxpr(closed, out_tree, open_regions, merge=True, sets_prints_apart=True)
    for step in flat.steps:
        effects = jaxprs.side_effects(step)
        if effects:
            bodies = map(jaxprs.find_callback, jaxprs.inner_jaxprs(step.equation))
            inside = "".join(f", in it {found}" for found in bodies if found)
            raise PlanError(
                f"The function has a side effect, and a region would run it twice: "
                f"{step.primitive} ({', '.join(effects)}) at {step.line}{inside}. Return the value "
                "and print or store it outside, or keep this part outside of what is planned. "
                "(Prints may stay but in a while_loop, a conditional that has results, a custom "
                "rule and a shard_map.)"
            )
        if step.primitive == "rng_uniform":
            raise PlanError(
                f"The function draws random bits without a key ({step.primitive} at {step.line}), "
                "and a region would draw others the second time. Use jax.random with a key."
            )
    return flat


def input_names(
    program: Program, fun: Callable, args: tuple, kwargs: dict
) -> list[tuple[str, str]]:
    """What a program takes: the name of each array in a call of its function, and its type."""
    try:
        parameters = [*inspect.signature(fun).parameters]
    except (TypeError, ValueError):
        parameters = []  # built in: its parameters have no names
    owners = [
        *parameters[: len(args)],
        *(f"args[{at}]" for at in range(len(parameters), len(args))),
    ]
    names = [
        owner + jax.tree_util.keystr(path)
        for owner, value in [*zip(owners, args, strict=True), *kwargs.items()]
        for path, leaf in jax.tree_util.tree_leaves_with_path(value)
        if jaxprs.is_array(leaf)
    ]
    closed_over = ["an array closed over"] * (program.input_count - len(names))
    return list(zip([*closed_over, *names], program.types[: program.input_count], strict=True))


def _differentiated(argnums: int | Sequence[int], args: tuple) -> set[int]:
    """The numbers of the positional arguments that ``argnums`` names, counted from the first.

    Raises:
        JaxmemError: there is no such argument, or none is named.
    """
    chosen = list(argnums) if isinstance(argnums, Sequence) else [argnums]
    count = max(len(args), 1)  # of a call by keywords alone the first is asked for, and not there
    for number in chosen:
        if not isinstance(number, int | np.integer) or not -count <= number < count:
            raise JaxmemError(
                "argnums= are the numbers of the positional arguments to differentiate, and the "
                f"call has {len(args)}; got {argnums!r}."
            )
    if not chosen:
        raise JaxmemError(
            "argnums= names no argument to differentiate; leave it out for the first."
        )
    return {int(number) % count for number in chosen}


def _numbers_as_arrays(argument: Any) -> Any:
    """An argument as it is where it is differentiated: Python's numbers are arrays there. Those of
    modules stay: `equinox.filter_grad` does not differentiate them."""

    equinox = sys.modules.get("equinox")

    def stays(node):
        return is_module(node) or (equinox is not None and isinstance(node, equinox.Module))

    def as_array(leaf):
        return jnp.asarray(leaf) if type(leaf) in (float, complex) else leaf

    return jax.tree.map(as_array, argument, is_leaf=stays)


def check_function(fun: Any, name: str) -> None:
    """Raises `JaxmemError` if ``fun`` is not a function of arrays."""
    linen = sys.modules.get("flax.linen")
    unbound = linen is not None and isinstance(fun, linen.Module) and fun.scope is None
    if not callable(fun) or isinstance(fun, type) or unbound:
        kind = fun if isinstance(fun, type) else type(fun)
        got = f"{'class' if fun is kind else 'object'} {kind.__module__}.{kind.__qualname__}"
        raise JaxmemError(
            f"{name} takes a function of arrays; got the {got}. "
            "Pass a function that applies the model, such as the loss: "
            "lambda params, batch: jnp.mean(model.apply(params, batch) ** 2)."
        )
