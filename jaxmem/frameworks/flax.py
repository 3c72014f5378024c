"""Flax modules: their dtypes, and nnx modules as functions of plain pytrees.

Flax is not imported here: whoever passes a module has imported it.
"""

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxmem import jaxprs
from jaxmem.ground.errors import JaxmemError


def is_nnx(value: Any) -> bool:
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(value, nnx.Module)


@dataclasses.dataclass(frozen=True)
class Structure:
    """What an nnx module is apart from its arrays."""

    graphdef: Any

    def functional(self, loss_fn: Callable) -> Callable:
        """``loss_fn(model, batch)`` as ``(params, batch, *, model_state)``, returning the model
        state after the loss."""
        nnx = sys.modules["flax.nnx"]

        def functional(params, batch, *, model_state=None, **extras):
            others = [] if model_state is None else [model_state]

            def called(params):
                model = nnx.merge(self.graphdef, params, *others)
                results = loss_fn(model, batch, **extras)
                nnx.pop(model, nnx.Intermediate)  # what a call sows is the call's
                return results, *split(model)[1:]

            results, changed, after = called(params)
            _check_params(params, changed, lambda params: called(params)[1])
            if model_state is None:
                return results
            loss, *metrics = results if isinstance(results, tuple) else (results,)
            if len(metrics) > 1:
                raise JaxmemError(
                    "loss_fn of an nnx model must return loss, with a dict of metrics after it if "
                    f"it likes; it returned {len(results)} values. The model's state is taken from "
                    "the model itself."
                )
            return (loss, after, *metrics)

        return functional


def _check_params(before: Any, after: Any, call: Callable) -> None:
    """Raises `JaxmemError` if ``call`` of parameters puts something else in the place of one."""
    leaves, tree = jax.tree.flatten(before)
    found = jax.tree.leaves(after)
    if all(one is other for one, other in zip(leaves, found, strict=True)):
        return
    # Other objects, as nnx.remat, nnx.jit and nnx.scan put there, may be the same values.
    flat = jaxprs.flatten(lambda *leaves: call(jax.tree.unflatten(tree, leaves)), leaves, True)
    first = flat.input_count - len(leaves)
    paths = (path for path, _ in jax.tree_util.tree_leaves_with_path(before))
    for number, (path, origin) in enumerate(
        zip(paths, jaxprs.resolve_passthrough(flat), strict=True), first
    ):
        if origin != number:
            raise JaxmemError(
                f"The call of the nnx model sets a parameter, {jax.tree_util.keystr(path)} (as "
                "nnx.SpectralNorm and nnx.WeightNorm do of the layers that they wrap). What a step "
                "trains is changed by its optimizer alone. Compute what the layer is to use from "
                "the parameter without setting it; clip parameters in the optimizer, or between "
                "steps: state._replace(params=...)."
            )


def split(module: Any) -> tuple[Structure, Any, Any]:
    """An nnx module's structure, its parameters and all its other arrays (None: none) as dicts."""
    nnx = sys.modules["flax.nnx"]
    if nnx.state(module, nnx.Intermediate):  # what earlier calls have sown
        module = nnx.clone(module)
        nnx.pop(module, nnx.Intermediate)
    graphdef, params, others = nnx.split(module, nnx.Param, ...)

    def pure(state):
        """The values themselves, not what hooks (``on_get_value=``) make of them."""
        return nnx.to_pure_dict(
            state, lambda one: one.get_raw_value() if isinstance(one, nnx.Variable) else one
        )

    return Structure(graphdef), pure(params), pure(others) or None


def with_dtypes(module: Any, compute: Any, params: Any) -> Any:
    """A module whose layers compute in one dtype and keep their parameters in another."""
    linen = sys.modules.get("flax.linen")
    if is_nnx(module):
        changed = _set_nnx(module, compute, params)
    elif linen is not None and isinstance(module, linen.Module):
        module, changed = _set_linen(module, linen, compute, params)
    else:
        raise JaxmemError(
            f"Precision.module takes a Flax linen or nnx module; got {type(module).__name__}. For "
            "a function use jaxmem.autocast."
        )
    if not changed:
        raise JaxmemError(
            f"{type(module).__name__} has no dtype to set. Give it a field dtype that it hands on "
            "to its layers, or use jaxmem.autocast on the function that applies it."
        )
    return module


def _set_linen(module: Any, linen: Any, compute: Any, params: Any) -> tuple[Any, bool]:
    changes: dict[str, Any] = {}
    for field in dataclasses.fields(module):
        value = getattr(module, field.name, None)
        if field.name == "dtype":
            changes["dtype"] = compute
        elif field.name == "param_dtype":
            changes["param_dtype"] = params
        elif field.name != "parent" and isinstance(value, linen.Module):
            inner, changed = _set_linen(value, linen, compute, params)
            if changed:
                changes[field.name] = inner
    return (module.clone(**changes), True) if changes else (module, False)


def _set_nnx(module: Any, compute: Any, params: Any) -> bool:
    nnx = sys.modules["flax.nnx"]
    changed = False
    for _, part in nnx.iter_graph(module):
        for name, dtype in (("dtype", compute), ("param_dtype", params)):
            if isinstance(part, nnx.Module) and hasattr(part, name):
                setattr(part, name, dtype)
                changed = True

    def cast(leaf):
        floating = jnp.issubdtype(leaf.dtype, jnp.floating)
        return leaf.astype(params) if floating else leaf

    nnx.update(module, jax.tree.map(cast, nnx.state(module, nnx.Param)))
    return changed
