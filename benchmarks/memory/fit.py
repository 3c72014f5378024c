"""What `jaxmem.fit` chooses, and what it took to find it.

Every budget is what is usable on the GPU, or a share of it. "plain" is the step as it is, by
projected bytes where it was not compiled; times are predicted beside plain's, and have not been
compared with a real GPU's. CPU seconds are those of this process, without XLA's compilations.
"""

import time

import jax
import jax.numpy as jnp
import optax

import jaxmem
from benchmarks._gpt import GPT
from benchmarks._models import example, unet
from benchmarks._record import record


def array(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def resnet50(batch: int):
    model = example("resnet50")
    net = model.ResNet()
    image = array(batch, 224, 224, 3)
    variables = jax.eval_shape(lambda x: net.init(jax.random.key(0), x, False), image)
    given = {"image": image, "label": array(batch, dtype=jnp.int32)}
    args = model.make_loss(net), optax.sgd(0.1, momentum=0.9), variables["params"], given
    return args, {"model_state": variables["batch_stats"]}


def unet512(batch: int):
    loss_fn, (params, given) = unet(batch, 512)
    return (loss_fn, optax.adam(1e-3), params, given), {}


def gpt2_medium(batch: int):
    """24 layers of width 1024 in a scan, context 1024."""
    gpt = GPT(width=1024, depth=24, heads=16, context=1024)

    def make(key):
        layers = jax.vmap(gpt.layer)(jax.random.split(key, gpt.depth))
        return {"embed": gpt.embedding(key), "layers": layers, "head": gpt.head(key)}

    def loss_fn(params, batch):
        x = gpt.embed(params["embed"], batch["tokens"])
        x, _ = jax.lax.scan(lambda x, layer: (gpt.block(layer, x), None), x, params["layers"])
        return gpt.loss(params["head"], (x, batch["labels"]))

    given = {name: array(batch, gpt.context, dtype=jnp.int32) for name in ("tokens", "labels")}
    params = jax.eval_shape(make, jax.random.key(0))
    return (loss_fn, optax.adamw(1e-4), params, given), {}


CASES = [
    ("ResNet50, 224x224, batch 200", resnet50, 200, "rtx-2080-ti", {}),
    ("ResNet50, batch 200", resnet50, 200, "rtx-2080-ti", {"budget": "60%"}),
    ("U-Net, 512x512, batch 16", unet512, 16, "rtx-2080-ti", {}),
    ("U-Net, batch 12", unet512, 12, "rtx-2080-ti", {"keep": "batch"}),
    ("GPT-2 medium, batch 8", gpt2_medium, 8, "rtx-3090", {}),
    ("GPT-2 medium, batch 8", gpt2_medium, 8, "rtx-3090", {"allow": "precision"}),
]


def fit(name, make, batch, target, options) -> dict:
    args, given = make(batch)
    began = time.process_time()
    fitting = jaxmem.fit(*args, target=target, **given, **options).fitting
    taken = time.process_time() - began
    plain = next(
        row
        for row in fitting.considered
        if row.remat == "none" and row.levers == jaxmem.fitting.Levers()
    )
    chosen = fitting.chosen
    return {
        "problem": name,
        "GPU": target,
        "budget": jaxmem.format_bytes(fitting.budget),
        "options": ", ".join(f"{key}={value!r}" for key, value in options.items()),
        "plain": jaxmem.format_bytes(plain.compiled or plain.projected),
        "chosen": f"{chosen.levers}; recompute {chosen.remat}",
        "compiled": jaxmem.format_bytes(chosen.compiled),
        "predicted time": f"{chosen.seconds / plain.seconds:.3f}x",
        "compilations": sum(row.compiled is not None for row in fitting.considered),
        "CPU seconds": f"{taken:.0f}",
    }


def main():
    rows = []
    for case in CASES:
        rows.append(fit(*case))
        note = __doc__.split("\n\n")[1].replace("\n", " ").strip()
        record("What jaxmem.fit chooses", rows, note)


if __name__ == "__main__":
    main()
