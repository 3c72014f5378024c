"""A step on its way through a compiler."""

import abc
import gzip
import pathlib
import tempfile

import jax

from jaxmem import jaxprs
from jaxmem.ground.bytes import format_bytes
from jaxmem.ground.checks import name_of, note_call
from jaxmem.ground.errors import CompileError, JaxmemError, OffloadError
from jaxmem.ground.garbage import uncollected
from jaxmem.ground.warn import warn
from jaxmem.ground.words import pluralize
from jaxmem.reports.lowered import Lowered
from jaxmem.reports.report import MemoryReport
from jaxmem.reports.totals import Totals
from jaxmem.reports.where.arguments import Argument, describe_arguments
from jaxmem.reports.where.reading import DUMPED, live_of, totals_of
from jaxmem.reports.xla.header import donated_arguments, results_on_host
from jaxmem.targets import CachedProgram, Job, LocalDevice, Target, family_of


class Compiling(abc.ABC):
    """A step that is traced and lowered, to be compiled once or more."""

    def start(  # noqa: B027 (the attached device's does nothing)
        self, compile: str = "buffers", hold: bool = False
    ) -> None:
        """Begins what `report` does, beside whatever else goes on; the next such `report` waits for
        it. With ``hold`` a full compilation goes on from where its buffers are assigned."""

    def stop(self) -> None:  # noqa: B027
        """Nobody waits for what was started."""

    def live(self) -> tuple[int, ...]:
        """Live device bytes at each point of what `report` compiled; empty: not known."""
        return ()

    @abc.abstractmethod
    def report(self, compile: str = "buffers", timeout: float = 3600) -> MemoryReport:
        """What the compiler says of it. Arguments and errors are those of `jaxmem.memory`."""


class _Absent(Compiling):
    """For a target that need not be there."""

    def __init__(self, jitted, args, kwargs, target: Target, options, timeline):
        self.target, self.timeline = target, timeline
        self.family = family = family_of(target)
        family.prepare(target)
        self.traced = _traced(jitted, args, kwargs)
        callback = jaxprs.find_callback(self.traced.jaxpr.jaxpr)
        if callback:
            warn(
                f"The step calls from the device into Python ({callback}). That cannot be compiled "
                f"for {target.name}, which is not there, so such calls are left out of this "
                "estimate; what they return is counted.",
            )
        self.lowered = jaxprs.lower_for(self.traced, family.platform)
        self.module, partitions = jaxprs.to_bytecode(self.lowered, locations=timeline)
        if partitions != target.count:
            raise JaxmemError(
                f"The step is partitioned over {pluralize(partitions, 'device')}, and the target "
                f"is {target.count} of {target.name}. Pass target=jaxmem.target({target.name!r}, "
                f"count={partitions}), or shard the arguments over a mesh of that size."
            )
        self.options = jaxprs.compiler_options(self.lowered) | (options or {})
        self.arguments = _arguments(jitted, self.traced, self.lowered, args, kwargs)
        self.job: Job[CachedProgram] | None = None
        self.started = ""  # what it compiles
        self.dump: dict[str, bytes] = {}

    def start(self, compile: str = "buffers", hold: bool = False) -> None:
        self.started, full = compile, compile == "full"
        self.job = Job(lambda: self._compile(full=full, hold=hold))

    def stop(self) -> None:
        if self.job is not None:
            self.job.stop()
            self.job = None

    def report(self, compile: str = "buffers", timeout: float = 3600) -> MemoryReport:
        if self.job is not None and compile == self.started:
            try:
                compiled = self.job.result()
            finally:
                self.stop()  # an interrupt comes before it has ended
        else:
            compiled = self._compile(timeout, full=compile == "full")
        hlo = compiled.text("hlo")
        totals = totals_of(compiled.text(DUMPED[0]))
        if compiled.stats and self.family.has_memory_analysis:
            totals = _totals(compiled.stats, *totals)
        self.dump = {kind: compiled.texts[kind] for kind in DUMPED}
        dump = self.dump if self.timeline else {}
        lowered = Lowered(self.module, dict(self.options))
        report = MemoryReport(self.target, *totals, hlo, dump, self.arguments, lowered)
        _check_offload(self.traced, self.lowered, hlo)
        if self.target.count == 1:
            _check_kept(self.traced, report)
        return report

    def live(self) -> tuple[int, ...]:
        return live_of(self.dump) if self.dump else ()

    def _compile(self, timeout: float = 3600, **how: bool) -> CachedProgram:
        return self.family.compile(self.module, self.target, self.options, timeout, **how)


class _Attached(Compiling):
    """For the attached device, by the compiler that JAX has loaded."""

    def __init__(self, jitted, args, kwargs, target: LocalDevice, options):
        self.target, self.options = target, options or {}
        self.traced = _traced(jitted, args, kwargs)
        self.lowered = self.traced.lower()
        self.arguments = _arguments(jitted, self.traced, self.lowered, args, kwargs)

    def report(self, compile: str = "buffers", timeout: float = 3600) -> MemoryReport:
        target, options = self.target, self.options
        with tempfile.TemporaryDirectory() as folder:
            dumping = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
            if target.platform == "cpu" or "xla_dump_to" in options:
                dumping = {}  # XLA's CPU compiler writes no live ranges
            try:
                compiled = self.lowered.compile(compiler_options={**dumping, **options} or None)
            except jax.errors.JaxRuntimeError as error:
                raise CompileError(
                    f"XLA could not compile the step for {target}:\n{error}"
                ) from error
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
        hlo = compiled.as_text()
        if target.platform != "cpu":  # where host and device are one memory
            _check_offload(self.traced, self.lowered, hlo)
        written = totals_of(gzip.decompress(dump[DUMPED[0]]).decode()) if dump else ()
        return MemoryReport(target, *_totals(stats, *written), hlo, dump, self.arguments)


def compiling(
    jitted, args, kwargs, target: Target | LocalDevice, options, timeline: bool
) -> Compiling:
    """A jitted function, traced and lowered for a target."""
    with uncollected():
        if isinstance(target, LocalDevice):
            return _Attached(jitted, args, kwargs, target, options)
        with jaxprs.in_place_of_attached(target):
            return _Absent(jitted, args, kwargs, target, options, timeline)


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
    resident = report.on_host.temp + report.on_host.output
    # Chosen: XLA keeps all of it or next to nothing; padding and what is equal make no tenth.
    if resident < 0.9 * kept:
        raise OffloadError(
            f"The step keeps {format_bytes(kept)} in host memory, first the value sent there at "
            f"{line}, and the compiled program has {format_bytes(resident)} there: XLA sends the "
            "rest when it is about to be fetched again, and it stays on the device until then. "
            "Offload what a layer keeps inside jax.lax.scan, or use "
            "jaxmem.layers(inputs='offload')."
        )


def _traced(jitted, args, kwargs):
    with note_call(name_of(jitted), jitted, args, kwargs):
        return jitted.trace(*args, **kwargs)


def _totals(stats, *written: Totals) -> tuple[Totals, Totals]:
    """What XLA's memory analysis says of device and host, with the constants that are in what it
    wrote at the compilation, if it did."""
    device, host = (one.constant for one in written) if written else (0, 0)
    return Totals.read(stats, "", device), Totals.read(stats, "host_", host)


def _arguments(jitted, traced, lowered, args, kwargs) -> tuple[Argument | None, ...]:
    """The arrays that the compiled program takes, in its order; None: not known."""
    results = jax.tree.leaves(traced.out_info)
    described = describe_arguments(jitted, args, kwargs, results)
    by_path = {argument.path: argument for argument in described}
    paths = jaxprs.argument_names(traced)
    return tuple(by_path.get(paths[number]) for number in jaxprs.kept_arguments(lowered))
