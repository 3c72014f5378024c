"""Microbatches and accumulation on ResNet50 (fp32, 224x224, momentum), compiled for an H200.

Bytes of a batch of 256 in 8 slices beside those of a batch of 32; and the FLOPs and bytes moved of
8 accumulated micro-steps beside those of 8 plain gradients and one update.
"""

import jax
import optax

import jaxmem
from benchmarks._models import example
from benchmarks._record import record
from jaxmem.reports.xla.traffic import count_bytes

MODEL = example("resnet50")
plan_step = example("resnet50", "train").plan_step

EVERY = 8


def slices() -> list[dict]:
    rows = []
    for batch, count in ((32, 1), (256, EVERY)):
        step, (state, arguments) = plan_step(batch, microbatches=count)
        report = jaxmem.memory(step, state, arguments, target="h200", timeline=False)
        parameters = sum(leaf.size * 4 for leaf in jax.tree.leaves(state.params))
        rows.append((batch, count, report.device, report.temp, report.work.flops, parameters))
    (*_, small, _, flops, _), (*_, parameters) = rows
    return [
        {
            "step": f"batch {batch}" + (f" in {count} slices" if count > 1 else ""),
            "device": jaxmem.format_bytes(device),
            "temp": jaxmem.format_bytes(temp),
            "against batch 32": f"{device / small:.3f}x",
            "bound: 1.15x and one buffer of parameters": jaxmem.format_bytes(
                int(1.15 * small) + parameters
            ),
            "FLOPs per image": f"{work / batch / (flops / 32):.4f}x",
        }
        for batch, count, device, temp, work, _ in rows
    ]


def work() -> list[dict]:
    """A cycle of micro-steps beside as many gradients and one update, by what their kernels do."""
    inner = optax.sgd(0.1, momentum=0.9)
    loss_fn = MODEL.make_loss(MODEL.ResNet())
    _, (state, batch) = plan_step(32)
    step = jaxmem.train_step(loss_fn, jaxmem.accumulate(inner, EVERY))
    started = jaxmem.eval_shape(lambda s: step.init(s.params, model_state=s.model_state), state)
    micro = step.memory(started, batch, target="h200", timeline=False)

    def gradient(params, batch, model_state):
        def loss(params):
            value, *others = loss_fn(params, batch, model_state=model_state)
            return value, others

        return jax.value_and_grad(loss, has_aux=True)(params)

    def update(gradients, opt_state, params):
        updates, opt_state = inner.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    plain = jaxmem.memory(
        gradient, state.params, batch, state.model_state, target="h200", timeline=False
    )
    updating = jax.jit(update, donate_argnums=(1, 2))
    arguments = (state.params, state.opt_state, state.params)
    last = jaxmem.memory(updating, *arguments, target="h200", timeline=False)

    waiting, applying = (count_bytes(micro.hlo, taken) for taken in (False, True))
    each, once = (count_bytes(one.hlo, False) for one in (plain, last))
    return [
        {
            "step": f"{EVERY} gradients of batch 32 and one update",
            "flops": EVERY * plain.work.flops + last.work.flops,
            "moved": EVERY * each + once,
        },
        {
            "step": f"{EVERY} micro-steps of jaxmem.accumulate",
            "flops": EVERY * micro.work.flops,
            "moved": (EVERY - 1) * waiting + applying,
        },
    ]


def overhead(rows: list[dict] | None = None) -> tuple[float, float]:
    """FLOPs and bytes that accumulation adds, as shares."""
    plain, accumulated = rows or work()
    return tuple(accumulated[name] / plain[name] - 1 for name in ("flops", "moved"))


def main():
    rows = work()
    flops, moved = overhead(rows)
    note = "; ".join(
        f"{row['step']}: {row['flops']:.4e} FLOPs, {jaxmem.format_bytes(row['moved'])} moved"
        for row in rows
    )
    note += f" ({flops:+.2%} FLOPs, {moved:+.2%} bytes)."
    record("Microbatches and accumulation: compiled bytes and work", slices(), note)


if __name__ == "__main__":
    main()
