"""Names of JAX that may move: private ones, those of ``jax.extend`` and ``jax.experimental``, and
one that is public and not documented. Each is imported at its first use.

A version of JAX that moves one breaks the feature that needs it, with a `JaxmemError`, and never
``import jaxmem``. CONTRIBUTING.md has this table too.
"""

import importlib
from importlib.metadata import version
from typing import Any

from jaxmem.ground.errors import JaxmemError

# Name: the module that has it, and what needs it.
NAMES = {
    "ClosedJaxpr": ("jax.extend.core", "reading and planning programs"),
    "Layout": ("jax.experimental.layout", "planned functions whose scans stack rows"),
    "Literal": ("jax.extend.core", "reading and planning programs"),
    "_optimization_barrier_lowering_rule": ("jax._src.lax.lax", "barriers in planned functions"),
    "NamedAxisEffect": ("jax._src.core", "collectives in planned functions"),
    "PassManager": (
        "jaxlib.mlir.passmanager",
        "compiling without a timeline, bytes on several devices",
    ),
    "Primitive": ("jax.extend.core", "barriers in planned functions"),
    "SymbolicZero": ("jax.custom_derivatives", "derivatives"),
    "Var": ("jax.extend.core", "regions that have regions"),
    "_ragged_dot_general_impl": ("jax._src.lax.lax", "bytes of jax.lax.ragged_dot"),
    "ad": ("jax._src.interpreters", "derivatives of planned functions"),
    "batching": ("jax._src.interpreters", "planned functions under jax.vmap"),
    "callback": ("jax._src", "reports of steps that call into Python"),
    "debugging": ("jax._src", "reports of steps that call into Python"),
    "hlo": ("jax._src.lib.mlir.dialects", "bytes of programs on several devices"),
    "jaxpr_as_fun": ("jax.extend.core", "residuals"),
    "mlir": ("jax._src.interpreters", "compiling for an absent device"),
    "partial_eval": ("jax._src.interpreters", "regions of planned functions"),
    "primal_left_tangent_right": ("jax._src.ad_checkpoint", "policies under the flag jax_remat3"),
    "primitives": ("jax.extend.core", "weak types in planned functions"),
    "remat": ("jax._src.interpreters", "policies under the flag jax_remat3"),
    "sdy": ("jaxlib.mlir.dialects", "bytes of programs on several devices"),
    "source_info_util": ("jax._src", "lines and modules of a program"),
    "with_layout_constraint": (
        "jax.experimental.layout",
        "planned functions whose scans stack rows",
    ),
}
# What an array, a traced step or a lowered one has, and its documentation does not promise.
ATTRIBUTES = {
    "lowered._lowering.compile_args": "which arguments a program reads",
    "lowered._lowering._compiler_options_kvs": "the options that a step was jitted with",
    "traced.lower(_private_parameters=)": "compiling steps that call into Python",
    "tracer._trace.frame.tracing_eqns": "the order in which gradients are made",
    "shape._memory_space": "arguments in host memory",
}


def __getattr__(name: str) -> Any:
    if name not in NAMES:
        raise AttributeError(name)
    module, needs = NAMES[name]
    try:
        value = _import(module, name)
    except (ImportError, AttributeError):
        raise moved(f"{module}.{name}", needs) from None
    globals()[name] = value
    return value


def attribute(value: Any, path: str) -> Any:
    """What an object of JAX's has: ``path`` is a key of `ATTRIBUTES`.

    Raises:
        JaxmemError: this version of JAX has it no longer.
    """
    _, *names = path.split(".")
    try:
        for name in names:
            value = getattr(value, name)
    except AttributeError:
        raise moved(path) from None
    return value


def moved(what: str, needs: str = "") -> JaxmemError:
    """The error where this version of JAX has a name no longer."""
    needs = needs or ATTRIBUTES[what]
    return JaxmemError(
        f"jax {version('jax')} has no {what}, which jaxmem needs for {needs}. This jaxmem "
        f"({version('jaxmem')}) was tested with jax 0.10.2 to 0.12: install one of those, or a "
        "newer jaxmem."
    )


def _import(module: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(module), name)
    except AttributeError:
        return importlib.import_module(f"{module}.{name}")
