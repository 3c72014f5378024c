"""How long collectives are predicted to take, by the algorithm that is taken for them."""

import json
import pathlib

import pytest

import jaxmem
from benchmarks.speed import collectives as published
from jaxmem.reports.speed.model import collective_seconds
from jaxmem.targets import bare_target
from jaxmem.targets.cuda import nccl
from jaxmem.targets.links import Group, Links

KINDS = ["all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute"]
TARGETS = ["h100", "b200", "a100-80gb", "v100-16gb", "rtx-4090", "v5e", "v5p"]
RESULTS = pathlib.Path(__file__).parent.parent / "benchmarks/results/speed.json"


def seconds(name, kind, size, devices, stride=1):
    target = jaxmem.target(name)
    return target.collective_seconds(kind, size, target.links.ring(devices, stride))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", TARGETS)
def test_more_bytes_take_longer_and_small_ones_hardly(name, kind):
    for devices in (2, 4, 8, 16, 64, 256):
        times = [seconds(name, kind, 2**power, devices) for power in range(4, 36)]
        assert times == sorted(times)
        assert 1e-6 < times[0] < 1e-3
        # The second half of many bytes takes as long as the first.
        assert times[-1] / times[-2] == pytest.approx(2, rel=0.1)


@pytest.mark.parametrize("devices", [4, 8, 64])
def test_most_bytes_are_limited_by_the_links(devices):
    """Of 32 GiB each device of a ring sends all that is not its own; to sum, twice."""
    target = jaxmem.target("a100-80gb")
    rate = target.links.inside * target.shares.link
    if devices > 8:  # a node sends by all of its eight cards
        rate = 8 * target.links.network * target.shares.network
    sent = 2**35 * (devices - 1) / devices
    for kind, turns in (("all-gather", 1), ("reduce-scatter", 1), ("all-reduce", 2)):
        found = seconds("a100-80gb", kind, 2**35, devices)
        assert found == pytest.approx(turns * sent / rate, rel=0.1)


def test_few_bytes_go_up_and_down_a_tree():
    """In a ring each doubling of devices would double the steps."""
    times = [seconds("h100", "all-reduce", 1024, devices) for devices in (64, 128, 256, 512)]
    assert times[-1] < 2 * times[0]
    gathers = [seconds("h100", "all-gather", 1024, devices) for devices in (64, 512)]
    assert gathers[1] > 5 * gathers[0]


def test_switches_sum():
    """NVLink SHARP, since Hopper: each device sends what it has once."""
    for name, least, most in (("a100-80gb", 1.9, 2.1), ("h100", 1.2, 1.6), ("b200", 1.2, 1.8)):
        sums, gathers = (seconds(name, kind, 2**33, 8) for kind in ("all-reduce", "all-gather"))
        assert least < sums / gathers < most
    # Two have nothing to gain from a switch.
    sums, gathers = (seconds("h100", kind, 2**33, 2) for kind in ("all-reduce", "all-gather"))
    assert sums / gathers == pytest.approx(2, rel=0.05)


def test_what_is_for_one_device_alone_has_one_way_into_the_network():
    """An all-gather passes each byte once between two nodes, by all of their cards; of an
    all-to-all seven of eight bytes are for other nodes, and each device has its card."""
    target = jaxmem.target("h100")
    card = target.links.network * target.shares.network
    assert seconds("h100", "all-to-all", 2**33, 64) == pytest.approx(2**33 * 7 / 8 / card, rel=0.05)
    inside = target.links.inside * target.shares.link
    assert seconds("h100", "all-to-all", 2**33, 8) == pytest.approx(
        2**33 * 7 / 8 / inside, rel=0.05
    )


@pytest.mark.parametrize(
    ("pairs", "between"),
    [
        ("{{0,1},{1,2},{2,3},{3,0}}", False),
        ("{{0,4},{4,0},{8,12},{12,8}}", False),
        ("{{7,8},{8,7}}", True),
        ("{{0,1},{1,2},{7,8}}", True),
        ("{{0,8},{8,0}}", True),
    ],
)
def test_a_permutation_is_as_slow_as_its_slowest_pair(pairs, between):
    target = jaxmem.target("h100", count=16)
    line = (
        f"f32[8] collective-permute(%x), channel_id=1, source_target_pairs={pairs}, metadata={{}}"
    )
    found = collective_seconds(line, "collective-permute", 2**33, target)
    links = target.links.reached(target.shares)
    assert found == pytest.approx(2**33 / (links.network if between else links.inside), rel=0.05)


@pytest.mark.parametrize(
    ("groups", "devices", "per_node"),
    [
        ("{{0,1,2,3,8,9,10,11},{4,5,6,7,12,13,14,15}}", 8, 4),  # an axis between two others
        ("[2,8]<=[2,2,4]T(1,0,2)", 8, 4),
        ("[1,16]<=[2,8]T(1,0)", 16, 8),  # the same devices in another order
        ("[1,16]<=[16]", 16, 8),
        ("[8,2]<=[2,8]T(1,0)", 2, 1),
        ("{{0,1,2,3,4,5}}", 6, 6),
    ],
)
def test_nodes_are_told_by_the_numbers_of_devices(groups, devices, per_node):
    """Whatever their order and how far the first two are apart."""
    target = jaxmem.target("h100", count=16)
    for kind in KINDS[:4]:
        line = f"f32[8] {kind}(%x), channel_id=1, replica_groups={groups}"
        expected = target.collective_seconds(kind, 2**26, Group(devices, per_node))
        assert collective_seconds(line, kind, 2**26, target) == expected


def test_a_ring_of_chips_sends_both_ways():
    target = jaxmem.target("v5e")
    rate, size = target.links.inside * target.shares.link, 2**30
    for devices in (4, 16):
        gathered = size * (devices - 1) / devices / rate + devices // 2 * 1e-6
        assert seconds("v5e", "all-gather", size, devices) == pytest.approx(gathered)
        assert seconds("v5e", "all-reduce", size, devices) == pytest.approx(2 * gathered)
        # A byte for the device opposite passes half of the ring, in the mean a quarter.
        scattered = size * devices / 4 / rate + devices // 2 * 1e-6
        assert seconds("v5e", "all-to-all", size, devices) == pytest.approx(scattered)
    assert seconds("v5e", "collective-permute", size, 16) == pytest.approx(2 * size / rate + 1e-6)


def test_of_a_device_that_is_not_known_links_alone_count():
    target = jaxmem.target("h100")
    bare = bare_target(target, rate=1e9)
    sent = 2 * 7 / 8 * 2**30 / (1e9 * bare.shares.link) + bare.shares.launch
    assert bare.collective_seconds("all-reduce", 2**30, Group(8, 8)) == pytest.approx(sent)


@pytest.mark.parametrize("kind", ["all-reduce", "all-gather"])
def test_a_pipeline_that_is_filled_for_nothing_is_the_best_of_its_algorithms(kind):
    """What filling costs is apart from what starts and what is sent."""
    links = Links(inside=1e11, network=1e10, kind="NVLink")
    for size in (2**10, 2**20, 2**30):
        times = [nccl.seconds(kind, size, Group(16, 8), links, filling) for filling in (0, 1, 2)]
        assert times == sorted(times) and times[2] <= 2 * times[0]


def test_published_times_are_predicted():
    """Of those that no number was fitted to, the median within 15 %, nine of ten within 55 %."""
    shares = jaxmem.target("h100").shares
    found = published.figures()
    known = set(sorted({one.table for one in found})[::2])
    errors = sorted(
        abs(one.error(shares.link, shares.network, nccl.FILLING))
        for one in found
        if one.table not in known
    )
    assert len(errors) >= 70
    assert errors[len(errors) // 2] <= 0.15 and errors[int(0.9 * len(errors))] <= 0.55


def test_what_is_free_is_what_is_fitted():
    note = json.loads(RESULTS.read_text())["collectives"]["runs"]["0.10.2"]["note"]
    shares = jaxmem.target("h100").shares
    said = f"Fitted: {shares.link:.2f} of links, {shares.network:.2f} of the network, "
    assert f"{said}{nccl.FILLING:.2f} for pieces." in note
