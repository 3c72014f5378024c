"""The call that a plan was made of, and the policy over its names."""

from collections.abc import Mapping
from typing import Any, TypeVar

import jax

from jaxmem import jaxprs
from jaxmem.ground.checks import check_call, check_count
from jaxmem.ground.errors import PlanError
from jaxmem.rematerialization.limits import Limits
from jaxmem.rematerialization.named.policy import NamedPolicy
from jaxmem.rematerialization.named.search import named_policy
from jaxmem.rematerialization.traced import TracedFunction, check_function, input_names
from jaxmem.targets import LocalDevice, Target, resolve

_Plan = TypeVar("_Plan")


def remembered(plan: _Plan, fun: Any, args: tuple, kwargs: dict, how: dict[str, Any]) -> _Plan:
    """The plan, which knows what it was made of from now on: the arguments as shapes, so that it
    keeps no array alive that ``fun`` itself does not."""
    args, kwargs = jax.tree.map(
        lambda leaf: jaxprs.abstract(leaf) if jaxprs.is_array(leaf) else leaf, (args, kwargs)
    )
    object.__setattr__(plan, "_call", (fun, args, kwargs, how))
    return plan


def policy_of(
    plan: Any,
    call: tuple | None,
    fixed: Mapping[str, str],
    target: str | Target | LocalDevice | None,
    limits: dict[str, Any],
) -> NamedPolicy:
    """What `Plan.as_policy` returns."""
    if call is None:
        raise PlanError(
            "This plan does not have its function, since it was read from JSON or copied. Pass the "
            "function and its arguments: plan.as_policy(fun, *args)."
        )
    fun, args, kwargs, how = call
    check_function(fun, "Plan.as_policy")
    check_call(fun, args, kwargs, "Plan.as_policy")
    check_count("Plan.as_policy", "compilations", limits["compilations"], 0)
    chosen = target or how.get("target") or (resolve(plan.target) if plan.target else None)
    known = resolve(chosen).known if chosen is not None else None
    given = fun, args, kwargs, how["argnums"], how["has_aux"]
    traced = TracedFunction(*given, target=known)
    whole = TracedFunction(*given, False, target=known) if plan.own_regions.kept else traced
    plan.layout_for(whole.program, lambda: input_names(whole.program, fun, args, kwargs))
    allowed = Limits(plan.allowance, known, **limits)
    traced.check_loss("Plan.as_policy", scalar=known is not None and allowed.compilations > 0)
    return named_policy(traced, allowed, fixed)
