"""The plan of a function, within a budget that the compiler confirms."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from jaxmem.ground.checks import check_call, check_count
from jaxmem.ground.errors import BudgetError
from jaxmem.rematerialization.compiled_plans import CompiledPlans
from jaxmem.rematerialization.constraints import Constraints
from jaxmem.rematerialization.named.call import remembered
from jaxmem.rematerialization.own_regions import WithOwnRegions
from jaxmem.rematerialization.plan import Plan
from jaxmem.rematerialization.traced import TracedFunction, check_function
from jaxmem.targets import LocalDevice, Target, resolve


def plan(
    fun: Callable,
    *args: Any,
    budget: int | str | None = None,
    planner: str = "dp",
    target: str | Target | LocalDevice | None = None,
    reserved: int | str = 0,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    offload: bool = False,
    regions: str = "open",
    compilations: int = 5,  # chosen: it bounds the time; most searches end sooner
    **kwargs: Any,
) -> Plan:
    """What ``fun`` should save and recompute in its backward pass.

    Args:
        fun: a differentiable function, usually the loss.
        *args, **kwargs: its arguments, real or abstract (`jax.ShapeDtypeStruct`); nothing is
            allocated. Leaves that are not arrays are taken as constants. Where they are sharded
            over a mesh (`jax.sharding.NamedSharding`), all bytes and FLOPs are those of one device,
            and ``target`` has as many devices (``jaxmem.target(name, count=8)``).
        budget: device bytes allowed for ``value_and_grad(fun)`` (arguments, gradients and
            residuals) and for what is reserved, an int or text such as ``"11GiB"`` or ``"80%"`` (of
            the target): the least recomputation that fits, in predicted time, of which FLOPs count
            most. None: the least memory that one more forward pass buys.
        planner: ``"dp"``: the optimum over nested regions and what they save, for any program that
            is about a chain; ``"dots"``: no matmul and no convolution is done twice, only what is
            between them; ``"sqrt"`` (Chen et al. 2016): one row of regions, each keeping what
            crosses its end, about sqrt(N) of them on N equal layers.
        target: the accelerator to plan for, present or not. The plan is compiled for it, compared
            with its budget and corrected. None: bytes are projected only.
        reserved: bytes of the budget spoken for outside of ``fun``: optimizer state, say.
        argnums, has_aux: as for `jax.value_and_grad`.
        offload: whether residuals of a `scan` may wait for the backward pass in host memory, where
            that takes less predicted time than to recompute them. (Elsewhere XLA drops it.)
        regions: what becomes of those that ``fun`` has already (`jax.checkpoint`, ``nn.remat``,
            ``nnx.remat``; in the bodies of scans too). They change nothing of what is computed, so
            ``"open"`` plans in their place, and the plan prints what they cost
            (``plan.own_regions.written``); ``"keep"`` leaves them whole, and plans beside them.
            Where they recompute less than what is found, and fit, they stay.
        compilations: how many at most; 0: none. The only one leaves room for what a projection may
            be off by, since no other corrects it. Before a budget is refused that the function may
            meet as it is, that is compiled besides.

    Returns:
        A `Plan`: ``plan.apply(fun)`` is the planned function.

    Raises:
        BudgetError: the budget does not parse, or nothing fits; names the lowest bytes found
            and the operation that sets it.
        PlanError: the function has side effects other than prints, returns nothing that can be
            differentiated (with a target: no floating-point scalar), or the planner is not known.
        OffloadError: XLA keeps residuals on the device that the plan has in host memory.
        JaxmemError: the target has no compiler here.

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
    check_function(fun, "jaxmem.plan")
    check_call(fun, args, kwargs, "jaxmem.plan")
    check_count("jaxmem.plan", "compilations", compilations, 0)
    constraints = Constraints.parse(budget, reserved, target, planner, offload, regions)
    opens, device = regions == "open", constraints.device
    traced = TracedFunction(fun, args, kwargs, argnums, has_aux, opens, target=device)
    traced.check_loss("jaxmem.plan", scalar=target is not None and compilations > 0)
    own = WithOwnRegions(traced, constraints) if traced.program.inlined_checkpoints else None
    if target is None or not compilations:
        found = constraints.plan(traced.program)
    else:
        found = _compiled(traced, constraints, resolve(target), compilations, own)
    known = dataclasses.replace(found.own_regions, written=own.cost if own else None)
    found = dataclasses.replace(found, own_regions=known)
    how = {"argnums": argnums, "has_aux": has_aux, "target": constraints.device}
    return remembered(found, fun, args, kwargs, how)


def _compiled(
    traced: TracedFunction,
    constraints: Constraints,
    device: Target | LocalDevice,
    compilations: int,
    own: WithOwnRegions | None,
) -> Plan:
    """The best plan that fits; the function as it is written, where that fits and its own regions
    recompute less."""
    search = CompiledPlans(traced, constraints, device)
    try:
        found = search.plan(compilations)
    except BudgetError:
        if own and (plan := own.plan(device)):
            return plan
        raise
    if own and constraints.budget.allowed is not None and search.is_worth_compiling(own.price):
        return own.plan(device) or found
    return found
