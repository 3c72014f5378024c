"""What a report costs beside the compilation, and how much of the peak it attributes.

ResNet50's training step (batch 100, target h200), whose compilation takes about 20 s of a free
core. Seconds are of CPU time.
"""

import pathlib
import tempfile
import time

import jaxmem
from benchmarks._models import example
from benchmarks._record import record
from jaxmem.reports.plain_data import describe

plan_step = example("resnet50", "train").plan_step


def main():
    step, args = plan_step(100)
    report = jaxmem.memory(step, *args, target="h200")
    began = time.process_time()
    describe(report)
    text = str(report)
    attribution = time.process_time() - began
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "report.html")
        began = time.process_time()
        report.to_html(path)
        page, size = time.process_time() - began, path.stat().st_size
    unknown = max(
        getattr(report, name).get("(not attributed)", 0)
        for name in ("by_phase", "by_kind", "by_module", "by_source")
    )
    rows = [
        {"what": "attribution, timeline and text", "value": f"{attribution:.2f} s"},
        {"what": "page", "value": f"{page:.2f} s, {jaxmem.format_bytes(size)}"},
        {"what": "lines of the printed report", "value": len(text.splitlines())},
        {"what": "device bytes", "value": jaxmem.format_bytes(report.device)},
        {"what": "of them fragmentation", "value": jaxmem.format_bytes(report.fragmentation)},
        {"what": "not attributed, at most", "value": f"{unknown / report.peak_bytes:.2%}"},
    ]
    record("The report of ResNet50's training step", rows)


if __name__ == "__main__":
    main()
