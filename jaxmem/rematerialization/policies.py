"""Policies for regions that the user places."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from jaxmem import jaxprs
from jaxmem.ground.checks import check_call
from jaxmem.ground.errors import JaxmemError
from jaxmem.program import (
    CONTRACTIONS,
    contraction_flops,
    precision_of,
    size_of,
)
from jaxmem.rematerialization.limits import Limits
from jaxmem.rematerialization.named.shaped import shaped_policy
from jaxmem.rematerialization.traced import TracedFunction, check_function
from jaxmem.targets import LocalDevice, Target, example_target, known_targets, resolve

# Times the time of writing the result. Chosen: at half every matmul is saved, since all read or
# write at least once what they write; twice would recompute those that read 1.5 times of it.
_EXPENSIVE = 1.25


def remat_policy(
    fun: Callable | None = None,
    *args: Any,
    budget: int | str | None = None,
    target: str | Target | None = None,
    reserved: int | str = 0,
    argnums: int | Sequence[int] = 0,
    **kwargs: Any,
) -> Callable[..., bool]:
    """A policy for regions that the user places: by `jax.checkpoint`, `flax.linen.remat` or
    `flax.nnx.remat`.

    Without a function: save what is dear to recompute for its bytes. Inside a region that is the
    results of matmuls and convolutions; everything that XLA fuses (activations, normalisation,
    dropout, casts) is recomputed. A matmul or convolution so thin that doing it again costs hardly
    more than writing its result (an outer product, say) is recomputed too: recomputing takes
    ``max(FLOPs / rate, (bytes read + bytes written) / bandwidth)`` on the target, and less than
    1.25 times the time of writing the result alone counts as cheap. Unlike
    `jax.checkpoint_policies.dots_saveable` it covers convolutions, and it knows the target.

    With a function whose blocks are regions already (``nn.remat(Block)``, in scans too), its
    arguments and a budget: of all policies that tell operations apart by the types of their
    operands, the one that recomputes the least and is projected to fit. It prints as what it saves
    and takes. `jaxmem.plan` can do more, since it places regions and nests them;
    `jaxmem.Plan.as_policy` tells values apart that have names.

    Args:
        fun: a differentiable function with regions of its own, usually the loss.
        *args, **kwargs: its arguments, real or abstract.
        budget: device bytes for ``value_and_grad(fun)`` and what is reserved, as for
            `jaxmem.plan`. None: the least memory.
        target: the accelerator whose rates decide; None: the attached one if it is known, else
            the default target.
        reserved: bytes of the budget spoken for outside of ``fun``.
        argnums: the differentiated arguments.

    Raises:
        JaxmemError: the target is not known, or has no compiler here; ``fun`` is not a function, or
            does not take these arguments, or there is a budget and no function.
        PlanError: the function has no regions.
        BudgetError: no policy is projected to fit; names the lowest bytes found.

    Returns:
        The policy; with a function a `ShapedPolicy`, which says what it saves.

    >>> import jax, jax.numpy as jnp, jaxmem
    >>> block = jax.checkpoint(lambda w, x: jnp.tanh(x @ w), policy=jaxmem.remat_policy())
    >>> jax.grad(lambda w: block(w, jnp.ones((2, 3))).sum())(jnp.eye(3)).shape
    (3, 3)
    """
    if target is not None:
        _known(resolve(target))
    if fun is not None:
        check_function(fun, "jaxmem.remat_policy")
        check_call(fun, args, kwargs, "jaxmem.remat_policy")
        limits = Limits.parse(budget, reserved, target)
        traced = TracedFunction(fun, args, kwargs, argnums, target=limits.target)
        return shaped_policy(traced, limits)

    if budget is not None or reserved != 0:
        raise JaxmemError(
            "jaxmem.remat_policy keeps a budget for a function: pass it and its arguments first. "
            "A policy without one knows no bytes."
        )

    def policy(primitive, /, *avals, **parameters) -> bool:
        if primitive.name not in CONTRACTIONS:
            return False
        # Not sooner: asking for the attached device starts JAX's backends.
        device = _known(target and resolve(target))
        result = jaxprs.result_of(primitive, avals, parameters)
        if jnp.issubdtype(result.dtype, jnp.complexfloating):
            return False  # JAX rounds what it saves to its own precision, which has no complex form
        written = size_of(result)
        moved = written + sum(map(size_of, avals))
        work = contraction_flops(primitive.name, avals, result, parameters)
        precision = precision_of(parameters)
        rate = device.flops_per_second(avals[0].dtype, precision)
        bandwidth = device.memory_bandwidth
        return max(work / rate, moved / bandwidth) >= _EXPENSIVE * written / bandwidth

    return jaxprs.OperationPolicy(policy)


@functools.cache
def _known(target: Target | LocalDevice | None) -> Target:
    chosen = target or resolve(None)
    if isinstance(chosen, Target):
        return chosen
    if chosen.known or target is None:
        return chosen.known or example_target()
    raise JaxmemError(
        f"The rates of the attached device ({chosen.description}) are not known, so what is dear "
        f"on it is not either. Name a target: {', '.join(known_targets())}."
    )
