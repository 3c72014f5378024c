"""Norm, activation and convolution in whole networks: plans instead of operations, for an H200.

Value and gradient of the loss: EfficientNet-B0, batch 128, bf16; DenseNet-121, batch 64; ResNet50,
batch 200. What the operations norm + activation + convolution and efficient DenseNet promise is had
by a plan on the unmodified network: planner "dots" does no convolution twice, and all that is
between them; dp has the bytes asked for as its budget. FLOPs are those of matmuls and convolutions,
relative to plain JAX.
"""

import jax
import jax.numpy as jnp

import jaxmem
from benchmarks._models import GIB, DenseNet, EfficientNet, classifier, example
from benchmarks._record import record_parts

OPTIONS = {"xla_disable_hlo_passes": "rematerialization"}  # as in Plan.compiler_options


def resnet():
    step, (state, batch) = example("resnet50", "train").plan_step(200)

    def loss(params, batch, model_state):
        value, *others = step.loss(params, batch, model_state)
        return value, others

    return loss, (state.params, batch, state.model_state)


CASES = {  # and the share of the plain bytes that is asked for
    "EfficientNet-B0": (lambda: classifier(EfficientNet(dtype=jnp.bfloat16), 128, 224), 0.7),
    "DenseNet-121": (lambda: classifier(DenseNet(), 64, 224), 0.56),
    "ResNet50": (resnet, 0.6),
}


def rows_of(name):
    make, share = CASES[name]
    loss, args = make()

    def compiled(loss):
        step = jax.jit(jax.value_and_grad(loss, has_aux=True))
        return jaxmem.memory(step, *args, target="h200", compiler_options=OPTIONS, timeline=False)

    plain = compiled(loss)
    budget = int(share * plain.device)
    plan = jaxmem.plan(loss, *args, budget=budget, target="h200", has_aux=True, compilations=3)
    once = jaxmem.plan(loss, *args, planner="dots", target="h200", has_aux=True)
    yield {
        "network": name,
        "plain": f"{plain.device / GIB:.2f} GiB",
        "asked": f"{budget / GIB:.2f} GiB",
        "dp": f"{plan.compiled_bytes / GIB:.2f} GiB",
        "dp: FLOPs": f"{plan.compiled.flops / plain.work.flops:.3f}x",
        "dots": f"{once.compiled_bytes / GIB:.2f} GiB",
        "dots: FLOPs": f"{once.compiled.flops / plain.work.flops:.3f}x",
    }


def main():
    title = "Norm, activation and convolution in whole networks"
    record_parts(title, "network", list(CASES), rows_of, __doc__.split("\n\n")[1])


if __name__ == "__main__":
    main()
