"""What the first line of a compiled program says of its arguments and results."""

import re


def donated_arguments(hlo: str) -> frozenset[int]:
    """Numbers of the arguments whose memory a compiled program's results take over."""
    header = hlo.partition("\n")[0]
    pairs = re.findall(r"\{[\d, ]*\}: \((\d+), \{[\d, ]*\}", header)
    return frozenset(map(int, pairs))


def results_on_host(hlo: str) -> list[bool]:
    """Whether each result of a compiled program is in host memory: those that take over an
    argument's memory are where that is, whatever their layout says."""
    header = re.sub(r"/\*.*?\*/", "", hlo.partition("\n")[0])
    layouts = header.partition("entry_computation_layout={(")[2].partition(", frontend_attributes=")
    arguments, _, results = layouts[0].partition(")->")
    on_host = [
        ["S(5)" in layout for layout in re.findall(r"\w+\[[\d,]*\](\{[^}]*\})?", part)]
        for part in (arguments, results)
    ]
    for result, argument in re.findall(r"\{(\d*)\}: \((\d+), \{\}", header):
        on_host[1][int(result or 0)] = on_host[0][int(argument)]
    return on_host[1]
