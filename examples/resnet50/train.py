"""Trains a ResNet with every memory lever on, or shows what a step would take on a GPU.

    python examples/resnet50/train.py                     # handwritten digits, on any machine
    python examples/resnet50/train.py --data DIR          # a folder of class folders of images
    python examples/resnet50/train.py --plan rtx-2080-ti  # bytes of ResNet50, batch 200; no GPU

Training uses `jaxmem.remat_policy` on the Flax blocks, bf16, and an optimizer wrapped by
`jaxmem.accumulate` and `jaxmem.offload`, in one jitted and donated step. It saves checkpoints and
resumes from them; on a CPU an interrupted run ends bit for bit where an uninterrupted one does.
Needs ``pip install 'jaxmem[examples]'``.
"""

import itertools
import pathlib
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import flax.linen as nn
import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
from model import Block, ResNet, make_loss
from PIL import Image

import jaxmem

sys.path.append(str(pathlib.Path(__file__).parents[1]))  # what all examples share is there
from shared import Checkpoints, count, digest, digits, parser, run

# ---- data: {"image": float32 [height, width, 3], "label": int32 []}, by index


class Digits:
    """scikit-learn's 1,797 handwritten digits, enlarged from 8x8 to 32x32."""

    classes = 10

    def __init__(self, train: bool, size: int):
        images, self.labels = digits(train)
        self.images, self.size = images * 15, size

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        image = Image.fromarray(self.images[index]).convert("RGB")
        return {"image": to_array(image, self.size), "label": self.labels[index]}


class ImageFolder:
    """A folder of class folders of images (ImageNet's layout).

    ``DIR/train`` and ``DIR/val`` where there are both, else the first image of each class of
    ``DIR`` and every tenth after it are held out.
    """

    def __init__(self, folder: pathlib.Path, train: bool, size: int):
        split = (folder / "train").is_dir() and (folder / "val").is_dir()
        root = folder / ("train" if train else "val") if split else folder
        every = folder / "train" if split else folder  # one numbering of classes for both
        names = sorted(entry.name for entry in every.iterdir() if entry.is_dir())
        self.files = []
        for label, name in enumerate(names):
            suffixes = Image.registered_extensions()
            files = (p for p in sorted((root / name).rglob("*")) if p.suffix.lower() in suffixes)
            for index, path in enumerate(files):
                if split or train == (index % 10 != 0):
                    self.files.append((path, label))
        if not self.files:
            kind = "training" if train else "held-out"
            raise SystemExit(f"{root} holds no class folders with {kind} images in them.")
        self.classes, self.size = len(names), size

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        path, label = self.files[index]
        with Image.open(path) as image:
            return {"image": to_array(image.convert("RGB"), self.size), "label": np.int32(label)}


def to_array(image: Image.Image, size: int) -> np.ndarray:
    """The central square, resized; about zero mean and unit variance."""
    side = min(image.size)
    left, top = (image.width - side) // 2, (image.height - side) // 2
    image = image.resize((size, size), box=(left, top, left + side, top + side))
    return np.asarray(image, np.float32) / 64 - 2


def training_batches(source, batch: int, seed: int, start: int):
    """Batches from micro-step ``start`` on: shuffled anew each epoch, the same in every run."""
    data = grain.MapDataset.source(source).seed(seed).shuffle().batch(batch, drop_remainder=True)
    return iter(data.repeat()[start:].to_iter_dataset(grain.ReadOptions(num_threads=2)))


# ---- training


def train(options) -> None:
    on_gpu = jax.default_backend() == "gpu"
    size = options.size or (224 if options.data else 32)
    if options.data:
        folder = pathlib.Path(options.data)
        training, held_out = (ImageFolder(folder, flag, size) for flag in (True, False))
    else:
        training, held_out = Digits(True, size), Digits(False, size)
    if len(training) < options.batch:
        raise SystemExit(f"{len(training)} training images are fewer than --batch {options.batch}.")

    # ResNet50 on a GPU; one narrow block a stage where there is only a CPU.
    shape = {} if on_gpu or options.resnet50 else {"sizes": (1, 1, 1, 1), "width": 16}
    policed = nn.remat(Block, static_argnums=(2,), policy=jaxmem.remat_policy())
    precision = jaxmem.precision(options.precision)
    model = ResNet(**shape, classes=training.classes, block=policed, dtype=precision.compute.type)

    updates = options.epochs * len(training) // options.batch // options.accumulate
    if not updates:
        raise SystemExit("Not one update: more --epochs, a smaller --batch or less --accumulate.")
    micro_steps = updates * options.accumulate
    rate = optax.warmup_cosine_decay_schedule(0.0, options.rate, updates // 10, updates)
    optimizer = jaxmem.accumulate(
        jaxmem.offload(optax.sgd(rate, momentum=0.9, nesterov=True)), options.accumulate
    )
    step = jaxmem.train_step(make_loss(model), optimizer, precision=precision)

    example = jnp.zeros((1, size, size, 3))
    variables = jax.jit(partial(model.init, train=True))(jax.random.key(options.seed), example)
    state = step.init(variables["params"], model_state=variables["batch_stats"])

    checkpoints = Checkpoints(options, SETTINGS)
    start, state = checkpoints.resume(state)

    print(
        f"{len(training)} training images of {size}x{size}, {count(state.params):,} parameters, "
        f"{precision}; {updates} updates of {options.accumulate} micro-steps of {options.batch}",
        flush=True,
    )
    target = options.target or ("local" if on_gpu else None)
    if target:
        report_memory(step, state, options.batch, size, target)

    began, last_print, counted = time.perf_counter(), -1, 0
    batches = training_batches(training, options.batch, options.seed, start)
    for index, batch in enumerate(itertools.islice(batches, micro_steps - start), start + 1):
        state, metrics = step(state, batch)
        now = time.perf_counter()
        if index == start + 1:
            jax.block_until_ready(metrics)
            began = time.perf_counter()  # the first step compiles
        else:
            counted += options.batch
        if now - last_print > options.print_every or index == micro_steps:
            loss, accuracy = float(metrics["loss"]), float(metrics["accuracy"])
            speed = counted / max(time.perf_counter() - began, 1e-9)
            print(
                f"micro-step {index:5}/{micro_steps}  loss {loss:7.4f}  accuracy {accuracy:.3f}"
                f"  {speed:7.1f} images/s",
                flush=True,
            )
            last_print = now
        checkpoints.save_at(index, state, last=index == micro_steps)

    print(f"held-out accuracy {evaluate(model, state, held_out, options.batch):.2%}")
    print(f"parameters {digest(state.params)}")


SETTINGS = "data size resnet50 batch accumulate epochs rate precision seed".split()


def report_memory(step, state, images: int, size: int, target: str) -> None:
    """What this very step takes on a GPU, which need not be there."""
    batch = {
        "image": jax.ShapeDtypeStruct((images, size, size, 3), jnp.float32),
        "label": jax.ShapeDtypeStruct((images,), jnp.int32),
    }
    report = step.memory(state, batch, target=target)
    print(
        f"the step takes {jaxmem.format_bytes(report.device)} of device memory and "
        f"{jaxmem.format_bytes(report.host)} of host memory on {target} (compiled)",
        flush=True,
    )


def evaluate(model: ResNet, state, source, batch: int) -> float:
    """Accuracy on images never trained on, by the running batch statistics."""
    variables = {"params": state.params, "batch_stats": state.model_state}
    predict = jax.jit(lambda images: model.apply(variables, images, False).argmax(-1))
    right = 0
    for group in grain.MapDataset.source(source).batch(batch):
        right += int((predict(group["image"]) == group["label"]).sum())
    return right / len(source)


# ---- planning, for a GPU that need not be there


def plan_step(batch: int, *, block=Block, dtype=None, **levers):
    """ResNet50's whole training step at 224x224, SGD with momentum, and its arguments; in fp32, and
    with no lever of `jaxmem.train_step` but those given. Each microbatch is normalised by its own
    statistics."""
    model = ResNet(block=block, dtype=dtype)
    optimizer = optax.sgd(0.1, momentum=0.9)
    step = jaxmem.train_step(make_loss(model), optimizer, reduction="mean", **levers)
    image = jax.ShapeDtypeStruct((1, 224, 224, 3), jnp.float32)
    variables = jax.eval_shape(partial(model.init, train=True), jax.random.key(0), image)
    state = jaxmem.eval_shape(
        lambda v: step.init(v["params"], model_state=v["batch_stats"]), variables
    )
    images = jax.ShapeDtypeStruct((batch, 224, 224, 3), jnp.float32)
    labels = jax.ShapeDtypeStruct((batch,), jnp.int32)
    return step, (state, {"image": images, "label": labels})


def plan(options) -> None:
    batch = options.plan_batch
    every_block = nn.remat(Block, static_argnums=(2,))
    cases = {
        (f"no remat, batch {batch // 2}", batch // 2): {},
        (f"no remat, batch {batch}", batch): {},
        (f"nn.remat on every block, batch {batch}", batch): {"block": every_block},
        (f"jaxmem.remat, batch {batch}", batch): {"remat": "sqrt"},
    }
    target = jaxmem.target(options.plan)
    print(f"ResNet50, 224x224, fp32, SGD with momentum: one whole training step\nfor {target}")
    print(f"{len(cases)} steps; compiling one takes about 20 s, and is done once: results are kept")

    def compile_case(case):
        (name, size), changes = case
        step, args = plan_step(size, **changes)
        began = time.perf_counter()
        report = jaxmem.memory(step, *args, target=target)
        flops = report.work.flops / size  # counted here, beside the other compilations
        print(f"  done in {time.perf_counter() - began:2.0f} s: {name}", flush=True)
        return report, flops

    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(compile_case, cases.items()))
    plain = results[1][1]
    print(f"\n{'':38}{'device':>11}{'FLOPs':>8}   on {options.plan}")
    for (name, _), (report, flops) in zip(cases, results, strict=True):
        verdict = "fits" if report.fits() else "does not fit"
        print(
            f"{name:38}{jaxmem.format_bytes(report.device):>11}{flops / plain:>7.2f}x   {verdict}"
        )
    if options.plan == "rtx-2080-ti":
        print(
            "\nMegEngine's published demonstration on this GPU: batch 100 fits, 200 does not, and "
            "200 fits\nwith its sublinear memory."
        )
    print(
        "\nFLOPs are those of matmuls and convolutions in the optimised program, per image, "
        "relative\nto no remat. XLA's own rematerialization pass is on, as it is by default: where "
        "a step does\nnot fit, XLA recomputes by itself. docs/proof.md has the bytes without it."
    )


def main() -> None:
    arguments = parser(
        __doc__,
        plan_batch=200,
        batch=32,
        accumulate=2,
        epochs=12,
        rate=0.1,
        precision="bf16",
        seed=0,
        save_every=100,
        folder="runs/resnet50",
    )
    arguments.add_argument(
        "--plan", metavar="TARGET", help="print ResNet50's bytes on a GPU, and end"
    )
    arguments.add_argument("--data", help="folder of class folders of images (default: digits)")
    arguments.add_argument("--size", type=int, help="image side (default: 32 for digits, else 224)")
    arguments.add_argument("--resnet50", action="store_true", help="ResNet50 on a CPU too")
    arguments.add_argument(
        "--target", help="print this step's bytes on that GPU (default: the attached)"
    )
    arguments.add_argument("--print-every", type=float, default=5.0, help="seconds")
    run(lambda options: plan(options) if options.plan else train(options), arguments)


if __name__ == "__main__":
    main()
