"""Compiling a step for a target, and the report of what it takes."""

import functools
import gzip
import pathlib
import tempfile
import types
import warnings
from collections.abc import Callable
from typing import Any

import jax

from jaxmem import jaxprs
from jaxmem.ground.bytes import format_bytes
from jaxmem.ground.checks import check_call, name_of, noted
from jaxmem.ground.errors import CompileError, JaxmemError, JaxmemWarning, OffloadError
from jaxmem.reports.cpu import CPU_NOTE, is_cpu
from jaxmem.reports.report import MemoryReport
from jaxmem.reports.totals import Totals
from jaxmem.reports.where.arguments import Argument, describe_arguments
from jaxmem.reports.where.reading import DUMPED, totals_of
from jaxmem.reports.xla.header import donated_arguments, results_on_host
from jaxmem.targets import LocalDevice, Target, family_of, resolve


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
            several GPUs, shard them over a `jax.sharding.AbstractMesh`. Where the step is not
            jitted, leaves that are neither arrays nor numbers are taken as constants.
        target: a GPU's name or `jaxmem.Target`, present or not; None: the attached device. The
            bytes of an attached CPU (``"local"``) hold for that CPU alone.
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
        JaxmemError: the target is not known, its compiler is not installed, or the step is
            partitioned for another number of devices than the target has.

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
    chosen = resolve(target)
    if target is None and is_cpu(chosen):
        warnings.warn(f"No target is named: {CPU_NOTE}", JaxmemWarning, stacklevel=2)
    jitted, args, kwargs = _jitted(step, args, kwargs)
    check_call(jitted, args, kwargs, "jaxmem.memory")
    args, kwargs = jax.tree.map(jaxprs.abstract, (args, kwargs))
    if isinstance(chosen, LocalDevice):
        return _local(jitted, args, kwargs, chosen, compiler_options)
    family = family_of(chosen)
    family.prepare(chosen)
    traced = _traced(jitted, args, kwargs)
    callback = jaxprs.find_callback(traced.jaxpr.jaxpr)
    if callback:
        warnings.warn(
            f"The step calls from the device into Python ({callback}). That cannot be compiled for "
            f"{chosen.name}, which is not there, so such calls are left out of this estimate; what "
            "they return is counted.",
            JaxmemWarning,
            stacklevel=2,
        )
    lowered = jaxprs.lower_for(traced, family.platform)
    module, partitions = jaxprs.to_bytecode(lowered, locations=timeline)
    if partitions != chosen.count:
        raise JaxmemError(
            f"The step is partitioned over {partitions} devices, and the target is {chosen.count} "
            f"of {chosen.name}. Pass target=jaxmem.target({chosen.name!r}, count={partitions}), or "
            "shard the arguments over a mesh of that size."
        )
    options = jaxprs.compiler_options(lowered) | (compiler_options or {})
    compiled = family.compile(module, chosen, options, timeout, compile == "full")
    hlo = compiled.text("hlo")
    totals = _totals(compiled.stats) if compiled.stats else totals_of(compiled.text(DUMPED[0]))
    dump = {kind: compiled.texts[kind] for kind in DUMPED} if timeline else {}
    described = _arguments(jitted, traced, lowered, args, kwargs)
    report = MemoryReport(chosen, *totals, hlo, dump, described)
    _check_offload(traced, lowered, hlo)
    if chosen.count == 1:
        _check_kept(traced, report)
    return report


def _check_offload(traced, lowered, hlo: str) -> None:
    """Raises `OffloadError` at the first array that is not where the step has it."""
    wanted, found = jaxprs.results_on_host(traced), results_on_host(hlo)
    results = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(traced.out_info)]
    if wanted is not None and len(wanted) == len(found):
        for path, asked, compiled in zip(results, wanted, found, strict=True):
            if asked != compiled:
                places = ("in host memory", "on the device")
                raise OffloadError(
                    f"The step's result{path} should be {places[not asked]}, and the compiled "
                    f"program has it {places[asked]}. JAX pairs donated arguments with results of "
                    "the same shape in order, whatever memory they are in: donate parameters and "
                    "state together and return them in the order in which they are taken, as "
                    "jaxmem.train_step does, or give out_shardings."
                )
    names, reused = jaxprs.argument_names(traced), donated_arguments(hlo)
    donated = jaxprs.donated_on_host(traced, lowered)
    for at, number in enumerate(jaxprs.kept_arguments(lowered)):
        if number in donated and at not in reused:
            raise OffloadError(
                f"{names[number]} is donated in host memory, and the compiled program does not "
                "write a result there: it would be in host memory twice. Return a result of the "
                "same shape and dtype in its place and in host memory, or do not donate it."
            )


def _check_kept(traced, report: MemoryReport) -> None:
    """Raises `OffloadError` if values that the step keeps in host memory are on the device."""
    kept, line = jaxprs.kept_on_host(traced)
    resident = report.host_temp + report.host_output
    if resident < 0.9 * kept:
        raise OffloadError(
            f"The step keeps {format_bytes(kept)} in host memory, first the value sent there at "
            f"{line}, and the compiled program has {format_bytes(resident)} there: XLA sends the "
            "rest when it is about to be fetched again, and it stays on the device until then. "
            "Offload what a layer keeps inside jax.lax.scan, or use "
            "jaxmem.layers(inputs='offload')."
        )


def _traced(jitted, args, kwargs):
    with noted(name_of(jitted), jitted, args, kwargs):
        return jitted.trace(*args, **kwargs)


def _local(jitted, args, kwargs, target: LocalDevice, options) -> MemoryReport:
    traced = _traced(jitted, args, kwargs)
    lowered = traced.lower()
    with tempfile.TemporaryDirectory() as folder:
        dumping = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
        if target.platform == "cpu" or "xla_dump_to" in (options or {}):
            dumping = {}  # XLA's CPU compiler writes no live ranges
        try:
            compiled = lowered.compile(compiler_options={**dumping, **(options or {})} or None)
        except jax.errors.JaxRuntimeError as error:
            raise CompileError(f"XLA could not compile the step for {target}:\n{error}") from error
        dump = {
            name: gzip.compress(path.read_bytes(), 3)
            for name in DUMPED
            for path in pathlib.Path(folder).glob(f"*_after_optimizations-{name}.txt")
        }
    analysis = compiled.memory_analysis()
    suffix = "_size_in_bytes"
    stats = {
        name.removesuffix(suffix): getattr(analysis, name)
        for name in dir(analysis)
        if name.endswith(suffix)
    }
    described = _arguments(jitted, traced, lowered, args, kwargs)
    hlo = compiled.as_text()
    if target.platform != "cpu":  # where host and device are one memory
        _check_offload(traced, lowered, hlo)
    return MemoryReport(target, *_totals(stats), hlo, dump, described)


def _totals(stats) -> tuple[Totals, Totals]:
    return Totals.read(stats), Totals.read(stats, "host_")


def _arguments(jitted, traced, lowered, args, kwargs) -> tuple[Argument | None, ...]:
    """The arrays that the compiled program takes, in its order; None: not known."""
    results = jax.tree.leaves(traced.out_info)
    described = describe_arguments(jitted, args, kwargs, results)
    by_path = {argument.path: argument for argument in described}
    paths = jaxprs.argument_names(traced)
    return tuple(by_path.get(paths[number]) for number in jaxprs.kept_arguments(lowered))


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
