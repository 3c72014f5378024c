"""A policy over names, with what it compiles to."""

import dataclasses
import json
import textwrap
from collections.abc import Iterable, Iterator

from jaxmem import jaxprs
from jaxmem.ground.bytes import format_bytes
from jaxmem.ground.errors import JaxmemError
from jaxmem.ground.words import pluralize
from jaxmem.rematerialization.plan_text import time_error_text
from jaxmem.reports.drawn.tables import Part, Printed, Table
from jaxmem.reports.drawn.verdict import short_verdict
from jaxmem.targets.memories import HOST_KIND

_MAXTEXT = {"save": "device", "offload": "offload", "recompute": "remat"}
_FORMATS = ("maxtext", "python")


@dataclasses.dataclass(frozen=True, slots=True)
class BuiltIn:
    """A policy of `jax.checkpoint_policies` in the place of a `NamedPolicy`.

    Attributes:
        name: what JAX calls it.
        bytes: device bytes that it compiles to, with what is reserved; None: it does not compile.
        recompute: FLOPs that it compiles to, over those without recomputation.
        unnamed: lines that make what it keeps and that no name marks: names there would make it
            reachable.
        better: whether it is within the budget and recomputes less than the named policy.
    """

    name: str
    bytes: int | None
    recompute: float
    unnamed: tuple[str, ...] = ()
    better: bool = False


@dataclasses.dataclass(frozen=True, repr=False)
class NamedPolicy(Printed, jaxprs.NamePolicy):
    """A policy of `jax.checkpoint` over the names of a program: `Plan.as_policy` makes it.

    It is passed as it is: ``jax.checkpoint(block, policy=policy)``, ``nn.remat(Block,
    policy=policy)``. ``config`` writes it for a trainer that takes text.

    Attributes:
        saveable_names, offloaded: the names that are saved on the device, and in host memory.
        order: all names that the regions of the program have, in the order of the program.
        bytes: device bytes of the whole of ``value_and_grad(fun)``, with what is reserved: by XLA
            for the target where ``compiled``, with XLA's default flags, as a trainer has them;
            otherwise projected.
        recompute: FLOPs (matmuls and convolutions) over those without recomputation: 1.0 computes
            nothing twice. By XLA where ``compiled``.
        projected_bytes: by jaxmem's own arithmetic.
        host_bytes: of the residuals that wait in host memory.
        recompute_share: predicted seconds of recomputation, of those of a plain step.
        compiled: whether it was compiled for the target.
        compilations: how many choices and built-in policies were.
        budget, reserved, target, time_error: as of the `Plan`.
        built_ins: what JAX's own policies compile to in its place.
        notes: what else to know, a sentence each.
    """

    order: tuple[str, ...] = ()
    bytes: int = 0
    recompute: float = 1.0
    projected_bytes: int = 0
    host_bytes: int = 0
    recompute_share: float = 0.0
    compiled: bool = False
    compilations: int = 0
    budget: int | None = None
    reserved: int = 0
    target: str = ""
    time_error: float | None = None
    built_ins: tuple[BuiltIn, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def names(self) -> dict[str, str]:
        """For each name ``"save"``, ``"offload"`` or ``"recompute"``."""
        return {name: self._action(name) for name in self.order}

    def config(self, format: str = "maxtext") -> str:
        """The policy as text.

        Args:
            format: ``"maxtext"``: lines of a YAML file of MaxText, ``remat_policy: custom`` and
                for each name ``device``, ``offload`` or ``remat``; ``"python"``: the call of
                `jax.checkpoint_policies` that makes it.

        Raises:
            JaxmemError: the format is not known.

        >>> import jax, jax.numpy as jnp, jaxmem
        >>> from jax.ad_checkpoint import checkpoint_name
        >>> def loss(w, x):
        ...     layer = jax.checkpoint(lambda x: jnp.sin(checkpoint_name(x @ w, "hidden")))
        ...     return jnp.sum(layer(layer(x)))
        >>> shapes = [jax.ShapeDtypeStruct(s, "float32") for s in [(64, 64), (1024, 64)]]
        >>> policy = jaxmem.plan(loss, *shapes, budget="2MiB").as_policy()
        >>> print(policy.config("maxtext"))
        remat_policy: custom
        hidden: device
        >>> print(policy.config("python"))
        jax.checkpoint_policies.save_only_these_names('hidden')
        """
        if format not in _FORMATS:
            known = " and ".join(map(repr, _FORMATS))
            raise JaxmemError(f"The formats of NamedPolicy.config are {known}; got {format!r}.")
        if format == "maxtext":
            lines = [f"{_key(name)}: {_MAXTEXT[how]}" for name, how in self.names.items()]
            return "\n".join(["remat_policy: custom", *lines])
        saved = [name for name, how in self.names.items() if how == "save"]
        if not self.offloaded:
            return f"jax.checkpoint_policies.save_only_these_names({', '.join(map(repr, saved))})"
        offloaded = [name for name, how in self.names.items() if how == "offload"]
        return (
            "jax.checkpoint_policies.save_and_offload_only_these_names(\n"
            f"    names_which_can_be_saved={saved!r},\n"
            f"    names_which_can_be_offloaded={offloaded!r},\n"
            f'    offload_src="device", offload_dst="{HOST_KIND}",\n)'
        )

    def _action(self, name: str) -> str:
        if name in self.offloaded:
            return "offload"
        return "save" if name in self.saveable_names else "recompute"

    def _parts(self) -> Iterable[Part]:
        how = "compiled" if self.compiled else "projected"
        yield (
            f"{short_verdict(self.bytes, self.budget)} ({how}), {self.recompute:.3f} x the FLOPs "
            f"of no recomputation, {self.recompute_share:.1%} slower "
            f"{time_error_text(self.time_error)}"
        )
        where = f" for {self.target}" if self.target else ""
        tried = f", {pluralize(self.compilations, 'compilation')}" if self.compilations else ""
        yield f"policy over {pluralize(len(self.order), 'name')}{where}{tried}"
        for action in ("save", "offload", "recompute"):
            found = [name for name, how in self.names.items() if how == action]
            if found:
                yield f"  {action:9}  {', '.join(found)}"
        if self.host_bytes:
            yield f"  in host memory {format_bytes(self.host_bytes)}"
        yield f"  projected {format_bytes(self.projected_bytes)}"
        if self.built_ins:
            yield Table(
                ("compiled", "x FLOPs", "", "in its place"),
                [
                    (
                        "none" if one.bytes is None else format_bytes(one.bytes),
                        "" if one.bytes is None else f"{one.recompute:.3f}",
                        _fits(one.bytes, self.budget),
                        one.name,
                    )
                    for one in self.built_ins
                ],
                left=(2, 3),
            )
        yield from self._unreachable()
        yield from self.notes
        yield "for MaxText: " + " ".join(self.config("maxtext").replace(": ", "=").split("\n"))

    def _unreachable(self) -> Iterator[str]:
        for one in self.built_ins:
            if not one.unnamed or one.bytes is None:
                continue
            count = len(one.unnamed)
            names = pluralize(count, "name")
            lines = textwrap.shorten(", ".join(one.unnamed), 60, placeholder=" ...")
            less = " fits, recomputes less, and" if one.better else ""
            yield (
                f"  {one.name}{less} keeps values without a name: {names} would make it reachable "
                f"({lines}); jaxmem.suggest_names says which"
            )


def _fits(size: int | None, budget: int | None) -> str:
    if size is None or budget is None:
        return ""
    return "fits" if size <= budget else "does not fit"


def _key(name: str) -> str:
    """A name as a key of YAML."""
    return name if name.replace("_", "a").isalnum() else json.dumps(name)
