"""What the usual policies cost: `jax.checkpoint` on every block of the model."""

from jaxmem.planning.layouts import Layout
from jaxmem.planning.per_block import block_partitions, per_block_regions, policies
from jaxmem.planning.rates import Rates
from jaxmem.planning.variants import Variant
from jaxmem.program import Program


def baseline_policies(program: Program, rates: Rates) -> dict[str, Layout]:
    """The layouts of everything saved, and of one policy after the other on every block, the
    blocks in the way in which that takes the fewest bytes; a program without blocks has none.
    Derivatives are JAX's own."""
    program = program.as_written
    variant = Variant.plain(program, rates)
    found = {"everything_saveable": variant.layout(())}
    rows = block_partitions(variant.program, variant.prices)
    for name, saved in policies(variant.program).items():
        layouts = [
            variant.layout(per_block_regions(variant.program, spans, saved)) for spans in rows
        ]
        if layouts:
            least = min(layouts, key=lambda layout: layout.peak)
            count = len(least.regions)
            where = f"each of {count} blocks" if count > 1 else "one block"
            found[f"{name} on {where}"] = least
    for name, variants in Variant.checkpointed(program, rates).items():
        least = min((one.layout(()) for one in variants), key=lambda layout: layout.peak)
        found[f"{name} on the body of each scan"] = least
    return found
