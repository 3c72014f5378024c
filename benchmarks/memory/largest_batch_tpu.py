"""The largest batches of three training steps on one TPU v5e.

    python -m benchmarks.memory.largest_batch_tpu           # all networks, an hour on two cores
    python -m benchmarks.memory.largest_batch_tpu ViT-B/16  # these rows; the others stay

ResNet50 (224 x 224, bfloat16, SGD with momentum), GPT-2 medium (1,024 tokens, a scan over 24
layers in bfloat16, AdamW) and ViT-B/16 (224 x 224, bfloat16, AdamW): the step in plain JAX, with a
policy of `jax.checkpoint` on every block, and with `jaxmem.remat`, which recomputes at most a whole
forward pass. Every batch is a multiple of 8 (GPT-2's of 1), found by `max_batch_size`: it was
compiled and fits, and so was the next one in the table, which does not. XLA's own rematerialization
pass is off, and its scheduler limited to the chip's memory. FLOPs are those of matmuls and
convolutions in the optimised program, per example, beside the plain step's.
"""

import functools
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import jaxmem
from benchmarks._models import Encoder, ViT, classifier, example
from benchmarks._record import record_parts
from benchmarks.planner.planner_gpt import POLICIES, workload as gpt2_medium
from jaxmem.targets.tpu.family import Tpu

TARGET = "v5e"
OPTIONS = Tpu().planned_options(jaxmem.target(TARGET).usable_bytes)
MULTIPLES = {"GPT-2 medium": 1}
PLANNED = functools.partial(jaxmem.remat, target=TARGET)
POLICY_NAMES = ("nothing_saveable", "dots_with_no_batch_dims_saveable")
plan_step = example("resnet50", "train").plan_step


def resnet50(batch: int, policy=None, **levers):
    block = example("resnet50").Block
    if policy:
        block = nn.remat(block, static_argnums=(2,), policy=policy)
    return plan_step(batch, block=block, dtype=jnp.bfloat16, compiler_options=OPTIONS, **levers)


def with_adamw(loss, params, batch, **levers):
    step = jaxmem.train_step(loss, optax.adamw(1e-3), compiler_options=OPTIONS, **levers)
    return step, (step.abstract(params), batch)


def gpt(batch: int, policy=None, **levers):
    loss, (params, _) = gpt2_medium("scan", policy)
    tokens = jax.ShapeDtypeStruct((batch, 1024), jnp.int32)
    return with_adamw(loss, params, (tokens, tokens), **levers)


def vit(batch: int, policy=None, **levers):
    block = nn.remat(Encoder, policy=policy) if policy else Encoder
    loss, (params, state, images) = classifier(ViT(dtype=jnp.bfloat16, block=block), batch, 224)
    return with_adamw(lambda params, batch: loss(params, state, batch)[0], params, images, **levers)


NETWORKS: dict[str, Callable] = {"ResNet50": resnet50, "GPT-2 medium": gpt, "ViT-B/16": vit}


def rows_of(name):
    make = NETWORKS[name]
    step, args = make(8)
    report = jaxmem.memory(step, *args, target=TARGET, timeline=False)
    plain = report.work.flops / 8
    cases: dict[str, dict] = {"plain JAX": {}}
    cases |= {f"`{policy}` on every block": {"policy": POLICIES[policy]} for policy in POLICY_NAMES}
    cases["`jaxmem.remat`"] = {"remat": PLANNED}
    for what, changes in cases.items():
        step, _ = make(8, **changes)
        found = jaxmem.max_batch_size(
            step,
            lambda batch, changes=changes: make(batch, **changes)[1],
            target=TARGET,
            multiple=MULTIPLES.get(name, 8),
        )
        row = {
            "network": name,
            "step": what,
            "largest batch": found.size,
            "does not fit": found.too_large or "",
            "compiled": jaxmem.format_bytes(found.report.device),
            "FLOPs an example": f"{found.report.work.flops / found.size / plain:.2f}x",
        }
        print(row, flush=True)
        yield row


def main():
    title, note = "The largest batches on a TPU v5e", __doc__.split("\n\n")[2]
    record_parts(title, "network", list(NETWORKS), rows_of, note)


if __name__ == "__main__":
    main()
