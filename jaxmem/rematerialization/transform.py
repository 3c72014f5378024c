"""Rematerialization: regions placed by a planner, onto any function or Flax module."""

import functools
from collections.abc import Callable
from typing import Any

from jaxmem.frameworks.modules import is_module, transform_module
from jaxmem.ground.errors import BudgetError, PlanError
from jaxmem.rematerialization.constraints import Constraints
from jaxmem.rematerialization.emission import planned_function
from jaxmem.rematerialization.plan import Plan
from jaxmem.rematerialization.traced import check_function
from jaxmem.targets import LocalDevice, Target

_ALL_GRADIENTS = (
    "jaxmem.remat counts a gradient of every floating-point argument, since it cannot know which "
    "are asked for. jaxmem.plan(..., argnums=) counts those alone: its plan, passed as "
    "jaxmem.remat(fun, plan=plan), may fit a lower budget."
)


def remat(
    fun: Callable | None = None,
    *,
    budget: int | str | None = None,
    planner: str = "dp",
    target: str | Target | LocalDevice | None = None,
    reserved: int | str = 0,
    offload: bool = False,
    regions: str = "open",
    plan: Plan | None = None,
) -> Callable:
    """``fun`` with regions of rematerialization placed by a planner.

    The function is traced when it is called, its jit-like calls are inlined into one flat
    program, and the planner's regions are emitted as nested `jax.checkpoint` around stretches of
    it. Values and gradients are those of ``fun``. Unlike `jax.checkpoint` there is nothing to place
    by hand, and the regions need not follow the functions or modules of the source.

    Works under `jit`, `grad`, `vmap` and `scan`, with closures over traced values, and with
    functions that hold `scan` (planned too), `cond` or custom derivatives (these stay whole), and
    in place of regions that ``fun`` has already (``regions="keep"`` leaves them whole). Leaves of
    the arguments that are not arrays are constants, so that there is
    no ``static_argnums``. What it prints (`jax.debug.print`, `jax.debug.callback`) is printed once,
    after its forward pass, and is in memory until then. What it changes in nnx modules that it is
    given is kept, as by `flax.nnx.remat`.

    Args:
        fun: any JAX function; a method of a module, where it decorates it in the class; a Flax
            linen module class, or an nnx module or module class, which comes back as one with its
            ``__call__`` planned and the same parameters (an nnx module shares its variables with
            the one that comes back). Without it, a decorator is returned.
        budget, planner, target, reserved, offload, regions: as for `jaxmem.plan`. Nothing is
            compiled here: the budget is met by projected bytes. To have the compiler's, make the
            plan first with `jaxmem.plan` and pass it as ``plan``.
        plan: a plan made before, instead of planning at each new shape; none of the others with it.

    Raises:
        PlanError: side effects in the function other than prints, a plan that belongs to another
            program, or a plan with a budget, a planner or any other of these beside it.
        BudgetError: the budget does not parse, or no plan is projected to fit, with gradients of
            all arguments: which are differentiated is not known. `jaxmem.plan` knows it.
        JaxmemError: ``fun`` is no function, or an instance of a linen module.

    >>> import jax, jax.numpy as jnp, jaxmem
    >>> @jaxmem.remat
    ... def loss(w, x):
    ...     for _ in range(16):
    ...         x = jnp.tanh(x @ w)
    ...     return x.sum()
    >>> jax.grad(loss)(jnp.eye(3), jnp.ones((2, 3))).shape
    (3, 3)
    """
    chosen: dict[str, Any] = {
        "budget": budget,
        "planner": planner,
        "target": target,
        "reserved": reserved,
        "offload": offload,
        "regions": regions,
    }
    constraints = Constraints.parse(budget, reserved, target, planner, offload, regions)
    usual = remat.__kwdefaults__ or {}
    given = ", ".join(f"{name}=" for name, one in chosen.items() if one != usual[name])
    if plan is not None and given:
        raise PlanError(
            f"jaxmem.remat has plan= already, so {given} would change nothing. Pass {given} to "
            "jaxmem.plan, which makes the plan, or leave plan= out."
        )
    decorator: Callable = functools.partial(remat, **chosen, plan=plan)
    if fun is None:
        return decorator
    if is_module(fun):
        return transform_module(fun, decorator)
    check_function(fun, "jaxmem.remat")
    if plan is not None:
        return plan.apply(fun)
    plans: dict[str, Plan] = {}

    def layout_for(program, inputs):
        if program.fingerprint not in plans:
            try:
                plans[program.fingerprint] = constraints.plan(program)
            except BudgetError as error:
                raise BudgetError(f"{error} {_ALL_GRADIENTS}", error.lowest) from None
        return plans[program.fingerprint]

    return planned_function(fun, layout_for, regions == "keep")
