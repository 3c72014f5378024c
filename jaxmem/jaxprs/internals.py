"""Names of JAX that may move: private ones, those of ``jax.extend`` and ``jax.experimental``, and
one that is public and not documented. Each is imported at its first use.

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
from jaxmem.ground.warn import warn

# Name: the module that has it, and what needs it. A call needs what the calls inside it need.
NAMES = {
    "ClosedJaxpr": ("jax.extend.core", "policies over names, plans of scans that have regions"),
    "Layout": ("jax.experimental.layout", "compiling planned scans, and scans at stage 3"),
    "Literal": ("jax.extend.core", "whatever reads a program: plans, reports, autocast, swap"),
    "NamedAxisEffect": (
        "jax._src.core",
        "plans of functions with collectives or calls into Python",
    ),
    "PassManager": (
        "jaxlib.mlir.passmanager",
        "plans on several devices, a cache that lines of code do not change",
    ),
    "Primitive": ("jax.extend.core", "planned functions, loops with a budget, jaxmem.ops"),
    "SymbolicZero": (
        "jax.custom_derivatives",
        "derivatives of jaxmem.ops and of loops with a budget",
    ),
    "Var": ("jax.extend.core", "plans of scans that have regions"),
    "_optimization_barrier_lowering_rule": (
        "jax._src.lax.lax",
        "planned functions, loops with a budget",
    ),
    "_ragged_dot_general_impl": ("jax._src.lax.lax", "plans of jax.lax.ragged_dot"),
    "ad": ("jax._src.interpreters", "planned functions, loops with a budget, jaxmem.ops"),
    "batching": ("jax._src.interpreters", "jax.vmap of planned functions"),
    "callback": ("jax._src", "reports of steps that call into Python"),
    "custom_partitioning_p": (
        "jax._src.custom_partitioning",
        "jax.custom_partitioning on absent devices",
    ),
    "debugging": ("jax._src", "reports of steps that call into Python"),
    "dispatch": ("jax._src", "calls into Python of steps on several absent devices"),
    "fused_attention_stablehlo": ("jax._src.cudnn", "attention by a kernel of the device's own"),
    "hlo": ("jax._src.lib.mlir.dialects", "plans on several devices"),
    "jaxpr_as_fun": ("jax.extend.core", "plans of loops, loops with a budget, policies over names"),
    "mlir": (
        "jax._src.interpreters",
        "compiling for a target, planned functions, loops with a budget, jaxmem.ops",
    ),
    "partial_eval": (
        "jax._src.interpreters",
        "planned functions, loops with a budget, steps that leave parameters as they are",
    ),
    "primal_left_tangent_right": ("jax._src.ad_checkpoint", "policies under the flag jax_remat3"),
    "primitives": (
        "jax.extend.core",
        "planned functions with weakly typed results of custom rules",
    ),
    "remat": ("jax._src.interpreters", "policies under the flag jax_remat3"),
    "sdy": ("jaxlib.mlir.dialects", "plans on several devices"),
    "source_info_util": ("jax._src", "lines and modules of a program"),
    "with_layout_constraint": (
        "jax.experimental.layout",
        "compiling planned scans, and scans at stage 3",
    ),
}
# What is read of those of them that are modules.
MEMBERS = {
    "ad": (
        "Zero",
        "defbilinear",
        "instantiate_zeros",
        "is_undefined_primal",
        "primitive_jvps",
        "primitive_transposes",
    ),
    "batching": ("primitive_batchers",),
    "hlo": ("BroadcastInDimOp", "ReshapeOp"),
    "mlir": (
        "LoweringParameters",
        "_lowerings",
        "ir",
        "lower_fun",
        "module_to_bytecode",
        "register_lowering",
        "wrap_with_memory_kind",
    ),
    "partial_eval": (
        "Offloadable",
        "Recompute",
        "Saveable",
        "convert_constvars_jaxpr",
        "custom_partial_eval_rules",
        "dce_jaxpr",
        "dce_rules",
        "partial_eval_jaxpr_custom_rules",
    ),
    "primitives": ("convert_element_type_p",),
    "remat": ("RematTrace", "rules"),
    "sdy": (
        "AxisRefAttr",
        "DimensionShardingAttr",
        "SubAxisInfoAttr",
        "TensorShardingAttr",
        "TensorShardingPerValueAttr",
    ),
    "source_info_util": (
        "current_name_stack",
        "new_name_stack",
        "user_context",
        "user_frames",
    ),
}
# What a program, an array, a traced step or a lowered one has, and its documentation does not
# promise.
ATTRIBUTES = {
    "equation.source_info.name_stack": "modules of a program",
    "equation.source_info.traceback": "lines of a program",
    "jaxpr.debug_info.arg_names": "names of arguments in reports",
    "jaxpr.debug_info.func_name": "jax.custom_partitioning on several absent devices",
    "jaxpr.debug_info.func_src_info": "names of custom rules in reports and errors",
    "lowered._lowering.compile_args": "which arguments a program reads",
    "lowered._lowering._compiler_options_kvs": "the options that a step was jitted with",
    "traced.lower(_private_parameters=)": "compiling steps that call into Python",
    "tracer._trace.frame.tracing_eqns": "the order in which gradients are made",
    "tracer._trace.frame.constid_to_tracer": "rules that read what they are not given",
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
    if name in MEMBERS:
        value = _Members(value, f"{module}.{name}", needs)
    globals()[name] = value
    return value


class _Members:
    """A module of JAX's whose names may move too."""

    def __init__(self, module: ModuleType, path: str, needs: str):
        self._module, self._path, self._needs = module, path, needs

    def __getattr__(self, name: str) -> Any:
        try:
            return getattr(self._module, name)
        except AttributeError:
            if name.startswith("__"):  # Python itself asks
                raise
            raise moved(f"{self._path}.{name}", self._needs) from None


@functools.cache
def optional(name: str) -> Any:
    """A name without which the rest works; None, with one warning: this version of JAX has it no
    longer."""
    try:
        return globals()[name] if name in globals() else __getattr__(name)
    except JaxmemError as error:
        warn(str(error))
        return None


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
