"""The report of what a step takes on a target."""

import functools
import types
from collections.abc import Callable
from typing import Any

import jax

from jaxmem import jaxprs
from jaxmem.ground.checks import check_call, check_seconds
from jaxmem.ground.errors import JaxmemError
from jaxmem.ground.warn import warn
from jaxmem.reports.compiling import Compiling, compiling
from jaxmem.reports.cpu import CPU_NOTE, is_cpu
from jaxmem.reports.report import MemoryReport
from jaxmem.targets import LocalDevice, Target, resolve


def memory(
    step: Callable,
    *args: Any,
    target: str | Target | LocalDevice | None = None,
    compiler_options: dict[str, Any] | None = None,
    timeout: float = 3600,
    timeline: bool = True,
    compile: str = "buffers",
    **kwargs: Any,
) -> MemoryReport:
    """The bytes that a step takes on a target, by compiling it; nothing runs, nothing is allocated.

    Args:
        step: a function, or a jitted one (then its donation, shardings and compiler options count).
        *args, **kwargs: its arguments: arrays or `jax.ShapeDtypeStruct`, with the shardings and
            memory kinds they have (`jaxmem.eval_shape` makes abstract ones that keep them). For
            several devices, shard them over a `jax.sharding.AbstractMesh`. Where the step is not
            jitted, leaves that are neither arrays nor numbers are taken as constants.
        target: an accelerator's name or `jaxmem.Target`, present or not; None: the attached device.
            The bytes of an attached CPU (``"local"``) hold for that CPU alone.
        compiler_options: XLA flags for this compilation alone, beside the step's own.
        timeout: seconds for the compilation.
        timeline: False: totals, FLOPs and transfers alone. What the compiler said is kept on disk,
            and then serves any code that makes the same program, on whatever lines.
        compile: ``"buffers"``: XLA is stopped when it has assigned the buffers, a third to
            three quarters of a compilation; ``"full"``: it generates the code too, which may yet
            fail. For the attached device it always does.

    Raises:
        CompileError: XLA refused the program, ran out of time, or died.
        OffloadError: the compiled program does not keep in host memory what the step asks for.
        JaxmemError: the target is not known, its compiler is not installed, ``timeout`` is no
            time, or the step is partitioned for another number of devices than the target has.

    Warns:
        JaxmemWarning: the step calls into Python, and the target is not there: calls are left
            out; or no target is named and the attached device is a CPU.

    >>> import jax, jax.numpy as jnp, jaxmem
    >>> report = jaxmem.memory(jnp.sin, jnp.ones((64, 64), jnp.float32), target="local")
    >>> report.argument
    16384
    """
    if compile not in ("buffers", "full"):
        raise JaxmemError(f"jaxmem.memory takes compile='buffers' or 'full'; got {compile!r}.")
    check_seconds("jaxmem.memory", "timeout", timeout)
    chosen = resolve(target)
    if target is None and is_cpu(chosen):
        warn(f"No target is named: {CPU_NOTE}")
    made = begin(
        step,
        *args,
        target=chosen,
        compiler_options=compiler_options,
        timeline=timeline,
        **kwargs,
    )
    return made.report(compile, timeout)


def begin(
    step: Callable,
    *args: Any,
    target: Target | LocalDevice,
    compiler_options: dict[str, Any] | None = None,
    timeline: bool = True,
    **kwargs: Any,
) -> Compiling:
    """What `memory` compiles, traced and lowered: to compile it beside others, or once more."""
    jitted, args, kwargs = _jitted(step, args, kwargs)
    check_call(jitted, args, kwargs, "jaxmem.memory")
    args, kwargs = jax.tree.map(jaxprs.abstract, (args, kwargs))
    return compiling(jitted, args, kwargs, target, compiler_options, timeline)


def _jitted(step: Any, args: tuple, kwargs: dict) -> tuple[Any, tuple, dict]:
    """The step as something that traces, whatever is bound to it as further arguments; what of its
    arguments `jax.jit` does not take (functions in the modules of Equinox, say) is None there."""
    if isinstance(step, type) or not callable(step):
        kind = step if isinstance(step, type) else type(step)
        raise JaxmemError(
            f"jaxmem.memory takes a function or a jitted one; got {kind.__qualname__}"
            f"{'' if step is kind else ' object'}. Pass the step that is to be compiled."
        )
    if isinstance(step, types.MethodType) and hasattr(step.__func__, "trace"):
        return step.__func__, (step.__self__, *args), kwargs
    if isinstance(step, functools.partial) and hasattr(step.func, "trace") and not step.keywords:
        return _jitted(step.func, (*step.args, *args), kwargs)
    if hasattr(step, "trace"):
        return step, args, kwargs
    if all(map(_is_data, jax.tree.leaves((args, kwargs)))):
        return jax.jit(step), args, kwargs
    constants = jax.tree.map(lambda leaf: None if _is_data(leaf) else leaf, (args, kwargs))
    args, kwargs = jax.tree.map(lambda leaf: leaf if _is_data(leaf) else None, (args, kwargs))

    @functools.wraps(step)
    def of_data(*args, **kwargs):
        def filled(leaf, constant):
            return constant if leaf is None else leaf

        args, kwargs = jax.tree.map(
            filled, (args, kwargs), constants, is_leaf=lambda leaf: leaf is None
        )
        return step(*args, **kwargs)

    return jax.jit(of_data), args, kwargs


def _is_data(leaf: Any) -> bool:
    return jaxprs.is_array(leaf) or isinstance(leaf, bool | int | float | complex)
