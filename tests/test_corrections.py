"""What is expected of programs that were not compiled, by those that were."""

import pytest

from jaxmem.rematerialization.corrections import Corrections, Outcome


def known(*found):
    """Of (projected, compiled, key)."""
    corrections = Corrections()
    for projected, compiled, key in found:
        corrections.record((projected, key), Outcome("", 0.0, projected, compiled, key))
    return corrections


def test_before_anything_is_compiled_projections_are_believed():
    nothing = known()
    assert nothing.ratio("a") == nothing.least_ratio == 1
    assert nothing.worst_case_goal(100) == 100
    assert nothing.least_expected(70, "a") == nothing.expected_by_nearest(70, "a") == 70
    # Nor does that tell which has no program.
    refused = known((100, None, "a"))
    assert refused.ratio("a") == 1 and not refused.compiled
    assert refused.worst_case_goal(100) == 100


def test_a_ratio_is_the_last_of_its_key_or_borrowed_and_rounded_up():
    some = known((100, 120, ("a", 1)), (100, 90, ("b", 1)), (200, 221, ("a", 1)))
    assert some.ratio(("a", 1)) == 1.105 and some.least_ratio == 0.9
    assert some.ratio(("a", 2)) == 1
    assert some.ratio(("a", 2), lambda key: key[0] == "a") == pytest.approx(1.12)
    assert some.ratio(("b", 2), lambda key: key[0] == "b") == pytest.approx(0.9)
    assert some.ratio(("c", 2), lambda key: key[0] == "c") == 1


def test_what_misses_the_budget_is_expected_to_be_further_off():
    some = known()
    some.record("one", Outcome("", 0.0, 100, 120, "a"), overshoot=1.1)
    assert some.ratio("a") == pytest.approx(1.32) and some.least_ratio == 1.2


def test_what_takes_more_than_one_that_was_projected_higher_is_an_exception():
    """Of plans of one step one compiled to 80.2 GiB, and one that was projected 3 GiB lower to
    93.4: XLA had attention's scores once more. All plans were expected to be so."""
    some = known((78, 80, "a"), (75, 93, "a"))
    assert some.ratio("a") == pytest.approx(80 / 78)
    assert known((75, 93, "a"), (78, 80, "a")).ratio("a") == pytest.approx(80 / 78)
    assert known((78, 80, "a"), (75, 79, "a")).ratio("a") == pytest.approx(79 / 75)
    assert known((78, 80, "b"), (75, 93, "a")).ratio("a") == pytest.approx(93 / 75)


@pytest.mark.parametrize(
    ("second", "goal"),
    [
        # 10 more bytes than projected, whatever is projected: 100 are left for 90.
        ((200, 210, "a"), 90),
        # A tenth more.
        ((200, 220, "a"), 100 / 1.1),
        # The line through both would rise by more than a tenth, and fall: neither is believed.
        ((200, 300, "a"), 100 / 1.1),
        ((200, 100, "a"), 90),
        # Of others nothing is learned.
        ((200, 300, "b"), 100 / 1.1),
        ((100, 300, "a"), 100 / 1.1),
        ((200, None, "a"), 100 / 1.1),
    ],
)
def test_the_line_through_two_tells_a_share_from_bytes(second, goal):
    some = known((100, 110, "a"), second)
    if second[:2] == (100, 300):  # the same projection: no line
        some = known((100, 110, "a"))
        some.record("other", Outcome("", 0.0, 100, 300, "a"))
    assert some.goal((100, "a"), 100) == pytest.approx(goal)


def test_the_worst_case_is_of_any_key_by_share_or_by_bytes():
    some = known((100, 120, "a"), (1000, 1050, "b"))
    assert some.worst_case_goal(1200) == pytest.approx(1000)  # by share
    assert some.worst_case_goal(200) == 150  # by bytes


def test_the_worst_case_leaves_out_what_is_of_another_kind():
    """A row that takes half as much again tells nothing of plans, but alone."""
    some = known((100, 105, "a"), (100, 150, "b"))
    assert some.worst_case_goal(210) == pytest.approx(140)
    assert some.worst_case_goal(210, [(100, "b")]) == pytest.approx(200)
    assert known((100, 150, "b")).worst_case_goal(210, [(100, "b")]) == pytest.approx(140)


def test_the_nearest_and_the_least_of_what_is_near():
    some = known((100, 130, "a"), (110, 105, "a"), (300, 200, "a"), (104, 10, "b"))
    assert some.expected_by_nearest(101, "a") == 131
    assert some.expected_by_nearest(280, "a") == 180
    assert some.least_expected(105, "a") == pytest.approx(105 * 105 / 110)
    assert some.least_expected(1000, "a") == 1000


def test_what_is_no_program_after_all_tells_nothing():
    some = known((100, 130, "a"), (200, 400, "b"))
    some.reject((200, "b"))
    assert some.worst_case_goal(130) == 100 and list(some.compiled) == [(100, "a")]
