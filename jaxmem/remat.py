"""Rematerialization: a plan onto any function, and a policy for regions the user places."""

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxmem import _jax
from jaxmem._bytes import parse_budget
from jaxmem._checks import check_call
from jaxmem._errors import JaxmemError, PlanError
from jaxmem.planning import Plan, plan_sqrt
from jaxmem.program import CONTRACTIONS, contraction_flops, read_program, size_of
from jaxmem.targets import LocalDevice, Target, known_targets, resolve

_PLANNERS = {"sqrt": plan_sqrt}
_DEAR = 1.25  # times the time of writing the result


def plan(
    fun: Callable,
    *args: Any,
    budget: int | str | None = None,
    planner: str = "sqrt",
    target: str | Target | LocalDevice | None = None,
    reserved: int | str = 0,
    **kwargs: Any,
) -> Plan:
    """Which stretches of ``fun`` to recompute in its backward pass.

    Args:
        fun: a differentiable function, usually the loss.
        *args, **kwargs: its arguments, real or abstract (`jax.ShapeDtypeStruct`); nothing is
            allocated. Leaves that are not arrays are taken as constants.
        budget: device bytes allowed for the whole step, an int or text such as ``"11GiB"`` or
            ``"80%"`` (of the target): the least recompute that is projected to fit. None: the
            least memory.
        planner: ``"sqrt"`` (Chen et al. 2016): one row of regions, each keeping what crosses its
            end, about sqrt(N) of them on N equal layers.
        target: what a percentage in ``budget`` refers to.
        reserved: bytes of the budget spoken for outside what is planned: parameters, gradients,
            optimizer state, batch.

    Returns:
        A `Plan`; ``jaxmem.remat(fun, plan=...)`` applies it. Its bytes are projected; compile
        with `jaxmem.memory` to see the compiler's.

    Raises:
        BudgetError: the budget does not parse, or no plan is projected to fit.
        PlanError: the function has side effects, or the planner is not known.

    >>> import jax, jax.numpy as jnp, jaxmem
    >>> def loss(w, x):
    ...     for _ in range(16):
    ...         x = jnp.tanh(x @ w)
    ...     return x.sum()
    >>> shapes = [jax.ShapeDtypeStruct(s, "float32") for s in [(64, 64), (1024, 64)]]
    >>> chosen = jaxmem.plan(loss, *shapes)
    >>> chosen.projected_bytes < 0.6 * chosen.plain_bytes
    True
    """
    _check_function(fun, "jaxmem.plan")
    check_call(fun, args, kwargs, "jaxmem.plan")
    allowed = _allowed(budget, reserved, target)
    dynamic, call = _jax.split_arrays(fun, args, kwargs)
    return _plan(_jax.flatten(call, dynamic), planner, *allowed)


def remat(
    fun: Callable | None = None,
    *,
    budget: int | str | None = None,
    planner: str = "sqrt",
    target: str | Target | LocalDevice | None = None,
    reserved: int | str = 0,
    plan: Plan | None = None,
) -> Callable:
    """``fun`` with regions of rematerialization placed by a planner.

    The function is traced when it is called, its jit-like calls are inlined into one flat
    program, and the planner's regions are emitted as `jax.checkpoint` around stretches of it.
    Values and gradients are those of ``fun``. Unlike `jax.checkpoint` there is nothing to place
    by hand, and the regions need not follow the functions or modules of the source.

    Works under `jit`, `grad`, `vmap` and `scan`, with closures over traced values, and with
    functions that hold `scan`, `cond`, custom derivatives or regions of their own; these stay
    whole.

    Args:
        fun: any JAX function; without it, a decorator is returned.
        budget, planner, target, reserved: as for `jaxmem.plan`.
        plan: a plan made before, instead of planning at each trace.

    Raises:
        PlanError: side effects in the function, or a plan that belongs to another program.
        BudgetError: the budget does not parse, or no plan is projected to fit.

    >>> import jax, jax.numpy as jnp, jaxmem
    >>> @jaxmem.remat(planner="sqrt")
    ... def loss(w, x):
    ...     for _ in range(16):
    ...         x = jnp.tanh(x @ w)
    ...     return x.sum()
    >>> jax.grad(loss)(jnp.eye(3), jnp.ones((2, 3))).shape
    (3, 3)
    """
    allowed = _allowed(budget, reserved, target)
    _planner(planner)
    if fun is None:
        return functools.partial(
            remat, budget=allowed[0], planner=planner, reserved=allowed[1], plan=plan
        )
    _check_function(fun, "jaxmem.remat")

    @functools.wraps(fun)
    def planned(*args, **kwargs):
        dynamic, call = _jax.split_arrays(_refusing_updates(fun), args, kwargs)
        flat = _jax.flatten(call, dynamic)
        chosen = plan
        if chosen is None:
            chosen = _plan(flat, planner, *allowed)
        else:
            chosen.check(read_program(flat).fingerprint)
        return _emit(flat, chosen, dynamic)

    return planned


def _emit(flat: _jax.FlatJaxpr, plan: Plan, leaves: Sequence[Any]) -> Any:
    """Evaluates a flat jaxpr with every region of the plan under `jax.checkpoint`."""
    values = dict(enumerate([*flat.consts, *leaves]))
    last_used = {value: len(flat.steps) for value in flat.outputs if isinstance(value, int)}
    for index, step in reversed(list(enumerate(flat.steps))):
        for value in step.uses:
            last_used.setdefault(value, index)
    done = 0
    for region in plan.regions:
        flat.run(flat.steps[done : region.start], values)
        steps = flat.steps[region.start : region.stop]
        made = {value for step in steps for value in step.outputs}
        reads = sorted({value for step in steps for value in step.uses} - made)
        keeps = sorted(value for value in made if last_used.get(value, -1) >= region.stop)

        def run(*operands, steps=steps, reads=reads, keeps=keeps):
            inner = dict(zip(reads, operands, strict=True))
            flat.run(steps, inner)
            return [inner[value] for value in keeps]

        results = jax.checkpoint(run)(*[values[value] for value in reads])
        values.update(zip(keeps, results, strict=True))
        done = region.stop
    flat.run(flat.steps[done:], values)
    return jax.tree.unflatten(flat.out_tree, [_jax.read(values, out) for out in flat.outputs])


def _plan(flat: _jax.FlatJaxpr, planner: str, budget: int | None, reserved: int) -> Plan:
    for step in flat.steps:
        effects = _jax.side_effects(step)
        if effects:
            raise PlanError(
                f"The function has a side effect, and a region would run it twice: "
                f"{step.primitive} ({', '.join(effects)}) at {step.line}. Return the value and "
                "print or store it outside, or keep this part outside of jaxmem.remat."
            )
    return _planner(planner)(read_program(flat), budget, reserved)


def _refusing_updates(fun: Callable) -> Callable:
    """``fun``, which may not change a Flax nnx module that it is given: the change would be made
    to a copy that is thrown away."""
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return fun

    def checked(*args, **kwargs):
        nodes = jax.tree.leaves((args, kwargs), is_leaf=lambda x: isinstance(x, nnx.Module))
        modules = [node for node in nodes if isinstance(node, nnx.Module)]
        before = jax.tree.leaves(modules)
        result = fun(*args, **kwargs)
        after = jax.tree.leaves(modules)
        if list(map(id, before)) != list(map(id, after)):
            raise PlanError(
                "The function changes a Flax nnx module that it is given (batch statistics or "
                "dropout counts, say), and jaxmem.remat would lose the change. Use nnx.split "
                "outside and nnx.merge inside, and return the new state."
            )
        return result

    return functools.wraps(fun)(checked)


def _planner(name: str) -> Callable:
    if name not in _PLANNERS:
        known = ", ".join(map(repr, _PLANNERS))
        raise PlanError(f"There is no planner named {name!r}; the known ones are {known}.")
    return _PLANNERS[name]


def _allowed(budget: int | str | None, reserved: int | str, target) -> tuple[int | None, int]:
    """Bytes of the budget, and of what is reserved of it."""
    capacity = resolve(target).usable_bytes if target is not None else None
    return (
        None if budget is None else parse_budget(budget, capacity),
        0 if reserved == 0 else parse_budget(reserved, capacity),
    )


def _check_function(fun: Any, name: str) -> None:
    if isinstance(fun, type) or not callable(fun):
        raise JaxmemError(
            f"{name} takes a function of arrays; got {fun!r}. For a Flax module class, wrap the "
            "class with nn.remat(Module, policy=jaxmem.remat_policy()), or plan the loss function "
            "that applies the model."
        )


# ---- a policy for regions that the user places


def remat_policy(*, target: str | Target | None = None) -> Callable[..., bool]:
    """A policy for regions the user places: save what is dear to recompute for its bytes.

    For `jax.checkpoint`, `flax.linen.remat` and `flax.nnx.remat`. Inside a region it saves the
    results of matmuls and convolutions and recomputes everything that XLA fuses (activations,
    normalisation, dropout, casts). A matmul or convolution so thin that doing it again costs
    hardly more than writing its result (an outer product, say) is recomputed too: recomputing
    takes ``max(FLOPs / rate, (bytes read + bytes written) / bandwidth)`` on the target, and less
    than 1.25 times the time of writing the result alone counts as cheap.

    Unlike `jax.checkpoint_policies.dots_saveable` it covers convolutions, and it knows the target.

    Args:
        target: the GPU whose rates decide; None: the attached GPU if it is a known one, else an
            H200.

    Raises:
        JaxmemError: the target is not known, or is not a GPU.

    >>> import jax, jax.numpy as jnp, jaxmem
    >>> block = jax.checkpoint(lambda w, x: jnp.tanh(x @ w), policy=jaxmem.remat_policy())
    >>> jax.grad(lambda w: block(w, jnp.ones((2, 3))).sum())(jnp.eye(3)).shape
    (3, 3)
    """
    if target is not None:
        _gpu(resolve(target))

    def policy(primitive, *avals, **parameters) -> bool:
        if primitive.name not in CONTRACTIONS:
            return False
        gpu = _gpu(
            target and resolve(target)
        )  # not sooner: asking for the attached device starts JAX's backends
        result = _jax.result_of(primitive, avals, parameters)
        written = size_of(result)
        moved = written + sum(map(size_of, avals))
        work = contraction_flops(primitive.name, avals, result, parameters)
        seconds = max(work / gpu.flops_per_second(avals[0].dtype), moved / gpu.memory_bandwidth)
        return seconds >= _DEAR * written / gpu.memory_bandwidth

    return policy


@functools.cache
def _gpu(target: Target | LocalDevice | None) -> Target:
    chosen = target or resolve(None)
    if isinstance(chosen, Target):
        return chosen
    if chosen.gpu or target is None:
        return chosen.gpu or known_targets()["h200"]
    raise JaxmemError(
        f"The rates of the attached device ({chosen.description}) are not known, so what is dear "
        f"on it is not either. Name a target: {', '.join(known_targets())}."
    )
