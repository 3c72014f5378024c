"""What all targets of one compiler share."""

import abc
import pathlib
import types
from collections.abc import Callable, Mapping
from typing import Any

from jaxmem.ground.errors import JaxmemError
from jaxmem.targets.accelerator import Target
from jaxmem.targets.cache import CachedProgram
from jaxmem.targets.matmul import Matmul
from jaxmem.targets.rules import Rules


class Family(abc.ABC):
    """A compiler, and the targets that it compiles for. To add one: a subclass in a folder of its
    own, and an entry of `jaxmem.targets.FAMILIES`.

    Attributes:
        name: by which `Target.family` names it.
        platform: what JAX lowers a step for.
        backend: what `jax.default_backend` is where one is attached.
        versions: of the compiler, for the command that installs it.
        licence: what to know of its licence; empty: nothing.
        example: a target to name in messages, and to plan for where none is named.
        shape_multiple: of which a batch is best one.
        compiler_options: XLA flags of every step that jaxmem planned: XLA has a rematerialization
            pass of its own, which pays recompute that no plan shows, and is off, as is what makes
            values long before they are read.
        pass_options: those with XLA's own rematerialization pass on.
        remat_pass_threshold: above what share of a device's memory that pass would act.
        widening_options: XLA flags of a step that computes in float32 what is bfloat16.
        copying_options: those of a step whose loops copy to host memory while they compute.
        fallback_options: those of a step that XLA does not compile without them.
        limit_option: the XLA flag that tells it how many MiB of a device it may use, all of which
            its scheduler spends; empty: it takes what it needs.
        chip_memories: names of the memories of the chip itself, by XLA's numbers ("colors").
        chip_bytes: how much these hold at most, on any of the targets: values that wait there are
            in no budget.
        rules: how it fuses and lays out.
        splitting: what cuts the sums of matmuls into parts (`Rules.parts`), made of its own fields;
            None: nothing does.
        custom_calls: what calls of kernels that are not XLA's compute, by what their names begin
            with, the longest first: a "dot", an "attention", a "convolution", or its
            "gradient of the input" or "gradient of the kernel".
        verifies_codegen: whether `jaxmem.fit` has code generated for the step that it returns.
        has_memory_analysis: whether JAX's analysis of what is compiled has all that is temporary.
    """

    name: str
    platform: str
    backend: str
    versions: str
    licence: str = ""
    example: str
    shape_multiple: int
    compiler_options: Mapping[str, Any]
    pass_options: Mapping[str, Any]
    remat_pass_threshold: float
    widening_options: Mapping[str, Any]
    copying_options: Mapping[str, Any] = types.MappingProxyType({})
    fallback_options: Mapping[str, Any] = types.MappingProxyType({})
    limit_option: str = ""
    chip_memories: Mapping[int, str] = types.MappingProxyType({})
    chip_bytes: int = 0
    rules: Rules = Rules()
    splitting: Callable[..., Callable[[Matmul], int]] | None = None
    custom_calls: Mapping[str, str] = types.MappingProxyType({})
    verifies_codegen: bool = True
    has_memory_analysis: bool = True

    def planned_options(
        self, limit: int | None = None, widens_bfloat16: bool = False, copies: bool = False
    ) -> dict[str, Any]:
        """XLA flags of a step that jaxmem planned for so many bytes of a device; that computes in
        float32 what is bfloat16, or not; whose loops copy to host memory, or not."""
        options = dict(self.compiler_options)
        if widens_bfloat16:
            options |= self.widening_options
        if copies:
            options |= self.copying_options
        return options | self.limit_options(limit)

    def device_queries(self, target: Target) -> dict[str, Callable[..., Any]]:
        """What JAX asks of the attached device while it traces, by the name of its function that
        asks: the answers for a target that is not attached."""
        return {}

    def attention(self, target: Target) -> str:
        """The implementation of `jax.nn.dot_product_attention` by a kernel of a target's own;
        empty: it has none."""
        return ""

    def limit_options(self, limit: int | None) -> dict[str, Any]:
        """XLA flags of a step that may take so many bytes of a device, whoever planned it."""
        if not self.limit_option or limit is None:
            return {}
        return {self.limit_option: max(limit >> 20, 1)}

    def pass_limit(self, target: Target, boundary: int, options: Mapping[str, Any]) -> int | None:
        """Bytes of temporary values above which XLA's own rematerialization pass acts, in a step
        whose arguments and results take ``boundary`` bytes; None: it is off, or that is not known.
        """
        return None

    def with_pass_limit(
        self, target: Target, boundary: int, options: Mapping[str, Any], limit: int
    ) -> Target:
        """A device so small that `pass_limit` is that.

        Raises:
            JaxmemError: it is not known on what the limit depends.
        """
        raise JaxmemError(f"Where XLA's own pass begins on {target.name} is not known.")

    @abc.abstractmethod
    def targets(self) -> dict[str, Target]:
        """The known targets, by name."""

    @abc.abstractmethod
    def compile(
        self,
        module: bytes,
        target: Target,
        options: dict[str, Any],
        timeout: float,
        full: bool = False,
        hold: bool = False,
    ) -> CachedProgram:
        """Compiles a module that was lowered for the platform, in a worker process: until its
        buffers are assigned (with ``hold``, so that it may go on from there), or in ``full``.

        Raises:
            CompileError: XLA refused the program, ran out of time, or died.
            JaxmemError: the compiler is not installed.
        """

    def prepare(self, target: Target) -> None:  # noqa: B027 (a family without workers has nothing)
        """Starts what will be needed soon, while the step is traced. Says nothing of errors."""

    @abc.abstractmethod
    def install(self, version: int | None = None) -> pathlib.Path:
        """Installs the compiler, and returns the folder it is in.

        Raises:
            JaxmemError: it cannot be installed.
        """
