"""Compiled bytes of a step on a target, as a report."""

import dataclasses
import functools
import types
from collections.abc import Callable
from typing import Any

import jax

from jaxmem import _jax
from jaxmem._bytes import format_bytes, parse_budget
from jaxmem._checks import check_call
from jaxmem._errors import CompileError, JaxmemError, OffloadError
from jaxmem.memory._hlo import Work, count_work
from jaxmem.memory._schedule import Collectives, Transfers, count_collectives, find_transfers
from jaxmem.program import size_of
from jaxmem.targets import LocalDevice, Target, compile_module, resolve

_CPU_NOTE = "compiled for the CPU, whose bytes say nothing about rematerialization on a GPU"


@dataclasses.dataclass(frozen=True, repr=False)
class MemoryReport:
    """Bytes of one compiled step on one device of the target, by XLA's buffer assignment.

    ``argument``, ``output``, ``alias`` (outputs that reuse a donated argument) and ``temp`` are
    device bytes; the ``host_`` ones are in host memory and are never part of ``device``.
    """

    target: Target | LocalDevice
    argument: int
    output: int
    alias: int
    temp: int
    host_argument: int
    host_output: int
    host_alias: int
    host_temp: int
    hlo: str = dataclasses.field(repr=False)

    @property
    def device(self) -> int:
        """Peak device bytes of the step: argument + output - alias + temp."""
        return self.argument + self.output - self.alias + self.temp

    @property
    def host(self) -> int:
        """Peak host bytes of the step."""
        return self.host_argument + self.host_output - self.host_alias + self.host_temp

    @functools.cached_property
    def work(self) -> Work:
        """FLOPs and number of matmuls and convolutions in the optimised HLO."""
        return count_work(self.hlo)

    @functools.cached_property
    def transfers(self) -> Transfers:
        """Copies between host and device, and how many have other work beside them."""
        return find_transfers(self.hlo)

    @functools.cached_property
    def collectives(self) -> Collectives:
        """Collectives of one run, on one device."""
        return count_collectives(self.hlo)

    def fits(self, budget: int | str | None = None) -> bool:
        """Whether the device bytes are within a budget; None: what is usable on the target.

        Raises:
            BudgetError: the budget does not parse.
        """
        usable = self.target.usable_bytes
        if budget is None and not usable:
            raise JaxmemError(
                f"The memory of {self.target.description} is not known; pass a budget to fits()."
            )
        return self.device <= (usable if budget is None else parse_budget(budget, usable))

    def __str__(self):
        rows = [
            ("argument", self.argument, self.host_argument),
            ("output", self.output, self.host_output),
            ("alias", -self.alias, -self.host_alias),
            ("temp", self.temp, self.host_temp),
            ("total", self.device, self.host),
        ]
        lines = [f"compiled for {self.target}", f"{'':10}{'device':>14}{'host':>14}"]
        for name, device, host in rows:
            lines.append(f"{name:10}{format_bytes(device):>14}{format_bytes(host):>14}")
        usable = self.target.usable_bytes
        if usable:
            verdict = "fits" if self.fits() else "does not fit"
            lines.append(f"{verdict}: {self.device / usable:.0%} of {format_bytes(usable)} usable")
        if isinstance(self.target, LocalDevice) and self.target.platform == "cpu":
            lines.append(f"note: {_CPU_NOTE}")
        return "\n".join(lines)

    __repr__ = __str__


def memory(
    step: Callable,
    *args: Any,
    target: str | Target | LocalDevice | None = None,
    compiler_options: dict[str, Any] | None = None,
    timeout: float = 3600,
    **kwargs: Any,
) -> MemoryReport:
    """The bytes that a step takes on a target, by compiling it; nothing runs, nothing is allocated.

    Args:
        step: a function, or a jitted one (then its donation and shardings count).
        *args, **kwargs: its arguments: arrays or `jax.ShapeDtypeStruct`, with the shardings and
            memory kinds they have (`jaxmem.eval_shape` makes abstract ones that keep them). For
            several GPUs, shard them over a `jax.sharding.AbstractMesh`.
        target: a GPU's name or `jaxmem.Target`, present or not; None: the attached device.
        compiler_options: XLA flags for this compilation alone.
        timeout: seconds for the compilation.

    Raises:
        CompileError: XLA refused the program, ran out of time, or died.
        OffloadError: the compiled program does not keep in host memory what the step asks for.
        JaxmemError: the target is not known, its compiler is not installed, the step calls into
            Python, or it is partitioned for another number of devices than the target has.

    >>> import jax, jax.numpy as jnp, jaxmem
    >>> report = jaxmem.memory(jnp.sin, jnp.ones((64, 64), jnp.float32), target="local")
    >>> report.argument
    16384
    """
    chosen = resolve(target)
    jitted, args = _jitted(step, args)
    check_call(jitted, args, kwargs, "jaxmem.memory")
    args, kwargs = jax.tree.map(_jax.abstract, (args, kwargs))
    if isinstance(chosen, LocalDevice):
        return _local(jitted, args, kwargs, chosen, compiler_options)
    traced = jitted.trace(*args, **kwargs)
    callback = _jax.find_callback(traced.jaxpr.jaxpr)
    if callback:
        raise JaxmemError(
            f"The step calls from the device into Python ({callback}), which cannot be compiled "
            "for a GPU that is not there. Leave it out for this, or take target='local'."
        )
    module, partitions = _jax.to_bytecode(_jax.lower_for_cuda(traced))
    if partitions != chosen.count:
        raise JaxmemError(
            f"The step is partitioned over {partitions} devices, and the target is {chosen.count} "
            f"of {chosen.name}. Pass target=jaxmem.target({chosen.name!r}, count={partitions}), or "
            "shard the arguments over a mesh of that size."
        )
    compiled = compile_module(module, chosen, options=compiler_options, timeout=timeout)
    report = _report(chosen, compiled.stats, compiled.hlo)
    on_host = _jax.host_results(traced)
    expected = report.host_output if on_host is None else sum(map(size_of, on_host))
    if chosen.count == 1 and expected != report.host_output:
        raise OffloadError(
            f"The step asks for {format_bytes(expected)} of its results in host memory, and the "
            f"compiled program has {format_bytes(report.host_output)} there. JAX pairs donated "
            "arguments with results of the same shape in order, whatever memory they are in: "
            "donate parameters and state together and return them in the order in which they are "
            "taken, as jaxmem.train_step does, or give out_shardings."
        )
    return report


def _local(jitted, args, kwargs, target: LocalDevice, options) -> MemoryReport:
    try:
        compiled = jitted.lower(*args, **kwargs).compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as error:
        raise CompileError(f"XLA could not compile the step for {target}:\n{error}") from error
    analysis = compiled.memory_analysis()
    suffix = "_size_in_bytes"
    stats = {
        name.removesuffix(suffix): getattr(analysis, name)
        for name in dir(analysis)
        if name.endswith(suffix)
    }
    return _report(target, stats, compiled.as_text())


def _report(target: Target | LocalDevice, stats: dict[str, int], hlo: str) -> MemoryReport:
    fields = ("argument", "output", "alias", "temp")
    counts = {name: stats[name] for name in (*fields, *(f"host_{name}" for name in fields))}
    return MemoryReport(target=target, hlo=hlo, **counts)


def _jitted(step: Any, args: tuple) -> tuple[Any, tuple]:
    """The step as something that traces, whatever is bound to it as further arguments."""
    if not callable(step):
        raise JaxmemError(f"jaxmem.memory takes a function or a jitted one; got {step!r}.")
    if isinstance(step, types.MethodType) and hasattr(step.__func__, "trace"):
        return step.__func__, (step.__self__, *args)
    if isinstance(step, functools.partial) and hasattr(step.func, "trace") and not step.keywords:
        return _jitted(step.func, (*step.args, *args))
    return (step if hasattr(step, "trace") else jax.jit(step)), args
