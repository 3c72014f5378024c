"""Further arguments of an optimizer's update: the loss, and functions of it."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxmem.ground.errors import JaxmemError
from jaxmem.levers.batch.accumulation import accumulates


def with_extras(update: Callable, known: dict[str, Any], opt_state: Any) -> Any:
    """``update`` with the loss, and with those further arguments that its optimizer asks for: some
    refuse what they do not take.

    Raises:
        JaxmemError: it asks for something else, or for the loss of a cycle that has several.
    """
    extra = {name: known[name] for name in known.keys() & {"value"}}
    while True:
        try:
            return update(**extra)
        except TypeError as error:
            if "value" in extra and re.search(r"unexpected keyword .*'value'", str(error)):
                extra = {}
                continue
            missing = re.search(r"missing \d+ required .*arguments?: (.*)", str(error))
            names = set(re.findall(r"'(\w+)'", missing[1] if missing else "")) - extra.keys()
            if not names:
                raise
            unknown = sorted(names - known.keys() - {"grad"})
            if unknown:
                raise JaxmemError(
                    f"The optimizer's update needs {unknown[0]}=, and train_step has only value= "
                    "(the loss), grad= and value_fn= for it. Write the step in a loop of your own, "
                    "with jaxmem.microbatch for the gradients."
                ) from error
            if accumulates(opt_state) and names - {"value"}:
                asked = " and ".join(f"{name}=" for name in sorted(names - {"value"}))
                raise JaxmemError(
                    f"The optimizer's update needs {asked}, for a line search on one loss, and "
                    "under gradient accumulation (jaxmem.accumulate, optax.MultiSteps) each call "
                    "of a cycle has another. Use train_step(..., microbatches=) instead."
                ) from error
            extra |= {name: known.get(name) for name in names}


def of_value_and_grad(value_and_grad: Callable[[Any], tuple[Any, Any]]) -> Callable[[Any], Any]:
    """A function of which value and gradient come together."""

    @jax.custom_vjp
    def value(params):
        return value_and_grad(params)[0]

    def backward(gradients, cotangent):
        return (jax.tree.map(lambda g: g * jnp.asarray(cotangent, g.dtype), gradients),)

    value.defvjp(value_and_grad, backward)
    return value
