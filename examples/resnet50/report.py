"""Where the memory of ResNet50's training step goes, with and without remat; needs no GPU.

    python examples/resnet50/report.py                  # pages and pictures into runs/report
    jaxmem estimate report:plain --target h200 --html plain.html   # the same, from this folder
    jaxmem diff report:plain report:every_block --target h200 --html diff.html --plot diff.png

Needs ``pip install 'jaxmem[examples,viz]'``.
"""

import argparse
import pathlib

import flax.linen as nn
from model import Block
from train import plan_step

import jaxmem

BATCH = 100


def plain():
    """The step as it is."""
    return plan_step(BATCH)


def every_block():
    """The step with `nn.remat` on every block."""
    return plan_step(BATCH, block=nn.remat(Block, static_argnums=(2,)))


def main(arguments=None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--target", default="h200")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/report"))
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    reports = []
    for make in (plain, every_block):
        step, args = make()
        report = jaxmem.memory(step, *args, target=options.target)
        report.plot(options.out / f"{make.__name__}.png")
        report.to_html(options.out / f"{make.__name__}.html")
        print(f"{make.__name__}: {make.__doc__}\n\n{report}\n")
        reports.append(report)
    found = jaxmem.diff(*reports)
    found.plot(options.out / "diff.png")
    found.to_html(options.out / "diff.html")
    print(found)
    print(f"\nPages and pictures are in {options.out}")


if __name__ == "__main__":
    main()
