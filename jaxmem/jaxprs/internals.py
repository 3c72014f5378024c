"""Names of JAX's own that its documentation does not promise, each imported at its first use.

A version of JAX that moves one breaks the feature that needs it, with a `JaxmemError`, and never
``import jaxmem``. CONTRIBUTING.md has this table too.
"""

import functools
import importlib
from collections.abc import Callable
from importlib.metadata import version
from types import ModuleType
from typing import Any

from jaxmem.ground.errors import JaxmemError

# Name: the module that has it, and what needs it.
NAMES = {
    "_optimization_barrier_lowering_rule": ("jax._src.lax.lax", "barriers in planned functions"),
    "NamedAxisEffect": ("jax._src.core", "collectives in planned functions"),
    "PassManager": (
        "jaxlib.mlir.passmanager",
        "compiling without a timeline, bytes on several devices",
    ),
    "_ragged_dot_general_impl": ("jax._src.lax.lax", "bytes of jax.lax.ragged_dot"),
    "ad": ("jax._src.interpreters", "derivatives of planned functions"),
    "batching": ("jax._src.interpreters", "planned functions under jax.vmap"),
    "callback": ("jax._src", "reports of steps that call into Python"),
    "custom_partitioning_p": ("jax._src.custom_partitioning", "compiling for absent devices"),
    "debugging": ("jax._src", "reports of steps that call into Python"),
    "dispatch": ("jax._src", "reports of steps on several devices"),
    "fused_attention_stablehlo": ("jax._src.cudnn", "attention by a kernel of the device's own"),
    "hlo": ("jax._src.lib.mlir.dialects", "bytes of programs on several devices"),
    "mlir": ("jax._src.interpreters", "compiling for an absent device"),
    "partial_eval": ("jax._src.interpreters", "regions of planned functions"),
    "primal_left_tangent_right": ("jax._src.ad_checkpoint", "policies under the flag jax_remat3"),
    "remat": ("jax._src.interpreters", "policies under the flag jax_remat3"),
    "sdy": ("jaxlib.mlir.dialects", "bytes of programs on several devices"),
    "source_info_util": ("jax._src", "lines and modules of a program"),
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


@functools.cache
def intercept(module: ModuleType, name: str, answer: Callable) -> None:
    """Has a function of JAX's answered by ``answer(function, *args)`` from now on, which has a
    context in which it answers otherwise: another thread may be in another one. Where this version
    of JAX has no such function, nothing asks it."""
    function = getattr(module, name, None)
    if function is not None:

        @functools.wraps(function)
        def answered(*args):
            return answer(function, *args)

        setattr(module, name, answered)


def _import(module: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(module), name)
    except AttributeError:
        return importlib.import_module(f"{module}.{name}")
