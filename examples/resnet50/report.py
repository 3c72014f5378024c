"""Where the memory of ResNet50's training step goes, before and after; needs no GPU.

    python examples/resnet50/report.py                  # pages and pictures into runs/report
    python examples/resnet50/report.py --fit rtx-2080-ti   # batch 200, before and after jaxmem.fit
    jaxmem estimate report:plain --target h200 --html plain.html   # the same, from this folder
    jaxmem diff report:plain report:every_block --target h200 --html diff.html --plot diff.png

Needs ``pip install 'jaxmem[examples,viz]'``.
"""

import argparse
import pathlib

import flax.linen as nn
import optax
from matplotlib import rc_context
from matplotlib.figure import Figure
from model import Block, ResNet, make_loss
from train import plan_step

import jaxmem

BATCH = 100
# What the picture of --fit tells apart, from the bottom, and Okabe and Ito's colours for it.
SHOWN = {
    "parameters and optimizer state": ("#0072b2", ["parameters", "optimizer state", "model state"]),
    "batch": ("#b8b8b8", ["batch"]),
    "residuals: kept for the backward pass": ("#e69f00", ["residuals"]),
    "gradients and temporaries": ("#009e73", ["gradients", "temporaries", "workspace", "outputs"]),
}
# Of the picture of --fit on a light and on a dark page: paper, ink, and the line of the budget.
SCHEMES = {"": ("#ffffff", "#1d1d1f", "#c00000"), "-dark": ("#1f2023", "#ececee", "#ff7b72")}


def plain():
    """The step as it is."""
    return plan_step(BATCH)


def every_block():
    """The step with `nn.remat` on every block."""
    return plan_step(BATCH, block=nn.remat(Block, static_argnums=(2,)))


def compare(target: str, out: pathlib.Path) -> None:
    """Reports of both, and what differs."""
    reports = []
    for make in (plain, every_block):
        step, args = make()
        report = jaxmem.memory(step, *args, target=target)
        report.plot(out / f"{make.__name__}.png")
        report.to_html(out / f"{make.__name__}.html")
        print(f"{make.__name__}: {make.__doc__}\n\n{report}\n")
        reports.append(report)
    found = jaxmem.diff(*reports)
    found.plot(out / "diff.png")
    found.plot(out / "diff-dark.png", dark=True)
    found.to_html(out / "diff.html")
    print(found)


def fit(target: str, out: pathlib.Path) -> None:
    """Twice the batch: the step as it is, and the one that `jaxmem.fit` makes of it."""
    _, (state, batch) = plan_step(2 * BATCH)
    optimizer = optax.sgd(0.1, momentum=0.9)
    step = jaxmem.fit(
        make_loss(ResNet()),
        optimizer,
        state.params,
        batch,
        model_state=state.model_state,
        target=target,
    )
    # Both without XLA's own rematerialization pass, which acts where a step does not fit.
    options = step.fitting.chosen.plan.compiler_options
    as_it_is, args = plan_step(2 * BATCH, compiler_options=options)
    before, after = as_it_is.memory(*args, target=target), step.fitting.report
    for name, report in (("before", before), ("after", after)):
        report.to_html(out / f"{name}.html")
    for scheme in SCHEMES:
        draw(before, after, jaxmem.target(target), out / f"fit{scheme}.png", scheme)


def draw(before, after, target, path: pathlib.Path, scheme: str) -> None:
    """Both timelines beside each other, with a line at what the GPU has for them."""
    paper, ink, red = SCHEMES[scheme]
    colors = dict.fromkeys("text.color axes.labelcolor axes.edgecolor ytick.color".split(), ink)
    with rc_context(colors | {"axes.facecolor": paper}):
        figure = draw_both(before, after, target, red)
        # What it says is in the file too: tests compare it with the results.
        said = ", ".join(axes.get_title() for axes in figure.axes)
        figure.savefig(path, facecolor=paper, metadata={"Description": said})


def draw_both(before, after, target, red: str) -> Figure:
    figure = Figure(figsize=(11, 4.6), dpi=120, layout="constrained")
    usable, most = target.usable_bytes / 2**30, before.device / 2**30
    for axes, title, report in zip(
        figure.subplots(1, 2, sharey=True),
        ("as it is", "after jaxmem.fit"),
        (before, after),
        strict=True,
    ):
        live = report.live_by_kind
        sizes = [sum(live[kind] for kind in kinds) / 2**30 for _, kinds in SHOWN.values()]
        colors = [color for color, _ in SHOWN.values()]
        axes.stackplot(range(len(sizes[0])), *sizes, colors=colors, labels=SHOWN, step="post")
        axes.axhline(usable, color=red, linewidth=1.6, linestyle="--")
        verdict = "fits" if report.fits() else "does not fit"
        axes.set_title(
            f"{title}: {jaxmem.format_bytes(report.device)}, {verdict}", fontweight="bold"
        )
        axes.set(xlim=(0, len(sizes[0]) - 1), ylim=(0, 1.04 * most), xticks=[])
        axes.set_xlabel("time: forward pass, backward pass, update")
        axes.spines[["top", "right"]].set_visible(False)
    first, second = figure.axes
    place = second.get_yaxis_transform()
    about = f"{target.memory_bytes // 10**9} GB GPU ({target.name}), {usable:.2f} GiB usable"
    second.text(0.98, usable * 1.01, about, color=red, ha="right", va="bottom", transform=place)
    first.set_ylabel("device memory (GiB)")
    handles, labels = first.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    figure.suptitle(
        f"ResNet50, one training step at batch {2 * BATCH}, compiled without the GPU, "
        "XLA's own rematerialization off"
    )
    return figure


def main(arguments=None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--target", default="h200")
    parser.add_argument("--fit", metavar="TARGET", help="what jaxmem.fit does for that GPU instead")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/report"))
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    if options.fit:
        fit(options.fit, options.out)
    else:
        compare(options.target, options.out)
    print(f"\nPages and pictures are in {options.out}")


if __name__ == "__main__":
    main()
