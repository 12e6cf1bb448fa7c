"""The learned policy's parts: stretches, thirds, hazards; and what it makes of advice."""

import random
from collections import Counter
from collections.abc import Sequence

import pytest

from policies.base import NO_HINTS, Access, Hints, Key
from policies.hazard import NUM_AGES, Hazards, age_of
from policies.learned import Learned
from policies.leaves import Leaves
from policies.stretch import Run
from policies.stretches import Stretches
from policies.thirds import Thirds


def test_stretches_agree_with_a_plain_tree_under_random_requests() -> None:
    for seed in range(40):
        rng, policy = random.Random(seed), Learned(30)
        resident = set[int]()
        for time in range(120):
            access = Access(float(time // 2))
            path = _branch(rng.randrange(60))
            if rng.random() < 0.3:  # a request that begins inside a sequence, as windows do
                path = path[rng.randrange(len(path)) :]
            for key in path:
                if key not in resident:
                    policy.insert(key, (key - 1) // 2 if key else None, access)
                    resident.add(key)
            if rng.random() < 0.8:
                policy.touch(path, access)
            if rng.random() < 0.2:
                policy.advise(path, Access(access.time, Hints(closed=True, priority=1)))
            for _ in range(rng.randrange(6)):
                if resident:
                    key = rng.choice(sorted(resident))
                    rng.choice([policy.evict, policy.remove])(key)
                    resident.remove(key)
            _check(policy, resident)


def _check(policy: Learned, resident: set[int]) -> None:
    """Every promise of `Stretches` and `Leaves`, from their insides."""
    stretches = policy._stretches
    known = dict.fromkeys(stretches.at.values())
    kids = Counter(s.parent for s in known if s.held and s.parent is not None)
    assert kids == Counter(stretches._kids)
    assert {key for s in known for key in s.keys[: s.held]} == resident
    assert stretches.num_gone == sum(len(s.keys) - s.held for s in known)
    assert set(stretches._gone) == {s for s in known if s.held < len(s.keys)}
    for stretch in known:
        assert stretch in stretch.run.stretches
        for parent, key in zip([stretch.parent, *stretch.keys], stretch.keys, strict=False):
            assert stretches.at[key] is stretch
            assert isinstance(key, int)
            assert parent == ((key - 1) // 2 if key else None)
        assert not kids.keys() & set(stretch.keys[:-1]), "others go on from inside a stretch"
    leaves = {s for s in known if s.held and s.keys[s.held - 1] not in kids}
    listed = {s for _, ranking in policy._leaves.rankings() for s in ranking}
    assert listed == leaves
    assert set(policy.victims()) == resident


def test_a_sequence_that_only_grows_is_a_few_stretches() -> None:
    policy = Learned(10_000)
    for turn in range(1, 200):
        path: list[Key] = list(range(turn * 10))
        for key in path[-10:]:
            policy.insert(key, path[path.index(key) - 1] if key else None, Access(float(turn)))
        policy.touch(path, Access(float(turn)))
    assert len(dict.fromkeys(policy._stretches.at.values())) <= 4


def test_a_path_is_covered_by_stretches_of_its_own() -> None:
    stretches = Stretches(Leaves())
    first = stretches.begin("a", None, Run(0.0))
    for parent, key in ("ab", "bc", "cd", "de"):
        assert stretches.lengthen(first, key, parent)
    assert [s.keys for s in stretches.cover(list("bcd"))] == [["b", "c", "d"]]
    assert [s.keys for s in stretches.cover(list("abcde"))] == [["a"], ["b", "c", "d"], ["e"]]


def test_a_third_of_numbers_is_in_each_third() -> None:
    thirds, rng = Thirds(), random.Random(3)
    counts = Counter(thirds.place(rng.lognormvariate(3, 4)) for _ in range(6000))
    assert all(1600 < counts[third] < 2400 for third in range(3)), counts


def test_thirds_follow_what_numbers_are_like_lately() -> None:
    thirds = Thirds()
    for number in [*range(1000), *range(100_000, 101_000)]:
        thirds.place(number)
    assert thirds.place(100_500) == 0
    assert thirds.place(1) == 0
    assert thirds.place(102_000) == 2


def test_ages_are_half_octaves() -> None:
    assert [age_of(s) for s in (0.0, 0.49, 0.5, 0.70, 0.71, 1.0, 2.0)] == [0, 0, 1, 1, 2, 3, 5]
    assert age_of(1e30) == NUM_AGES - 1


def _observe(hazards: Hazards, start: int, outcomes: Sequence[tuple[int, float, bool]]) -> int:
    """Observations of `(class, how long, used)`, one a second from `start` on; when they end."""
    ends = []
    for at, (of, seconds, used) in enumerate(outcomes, start):
        hazards.begin(of, 1, hazards.bits(1), float(at))
        ends.append((at + seconds, of, float(at), used))
    for end, of, begun, used in sorted(ends):
        hazards.end(of, 1, 0.0, begun, end, used=used)
    return start + len(outcomes)


def _learn(hazards: Hazards, time: float) -> None:
    hazards.learn(time)
    for _ in range(12):
        hazards.go_on()


def test_what_is_used_again_soon_is_worth_more_than_late_and_late_more_than_never() -> None:
    hazards = Hazards([0, 1, 2], [0, 0, 0])
    outcomes = [(0, 2.0, True), (1, 500.0, True), (2, 900.0, False)] * 200
    time = _observe(hazards, 0, outcomes)
    _learn(hazards, time + 2000.0)
    soon, late, never = (hazards.worth(of, 0.0) for of in range(3))
    assert soon > 10 * late > 10 * never
    assert hazards.worth(0, 100.0) < hazards.worth(1, 100.0), "what did not come soon will not"


def test_a_class_that_was_not_seen_is_taken_for_one_of_its_base_or_kind() -> None:
    hazards = Hazards([0, 0, 1], [0, 1])
    time = _observe(hazards, 0, [(0, 2.0, True), (2, 900.0, False)] * 100)
    _learn(hazards, time + 2000.0)
    assert hazards.worth(1, 0.0) == pytest.approx(hazards.worth(0, 0.0), rel=0.1)
    assert hazards.worth(1, 0.0) > 10 * hazards.worth(2, 0.0)


def test_a_change_of_class_is_no_use_and_no_end() -> None:
    hazards = Hazards([0, 1], [0, 1])
    for at in range(200):
        hazards.begin(0, 1, 0.0, float(at))
        hazards.change(0, 1, 1, 0.0, float(at), at + 20.0)
        hazards.end(1, 1, 0.0, float(at), at + 40.0, used=True)
    _learn(hazards, 2000.0)
    assert hazards.worth(0, 0.0) == 0, "none was used while it was of class 0"
    assert hazards.worth(1, 20.0) > 0.01


def test_what_was_learned_long_ago_weighs_less() -> None:
    def worth_after(half_lives: float) -> float:
        hazards = Hazards([0], [0])
        time = _observe(hazards, 0, [(0, 2.0, True)] * 400)
        hazards.pass_by(half_lives)
        bits = hazards.bits(1)
        for at in range(100):
            hazards.begin(0, 1, bits, float(time + at))
            hazards.end(0, 1, bits, float(time + at), time + at + 2000.0, used=False)
        _learn(hazards, time + 4000.0)
        return hazards.worth(0, 0.0)

    assert worth_after(6) < 0.2 * worth_after(0)


def test_forgetting_never_runs_out_of_numbers() -> None:
    hazards = Hazards([0], [0])
    time = 0
    for _ in range(300):
        bits = hazards.bits(1)
        for at in range(time, time + 20):
            hazards.begin(0, 1, bits, float(at))
        for at in range(time, time + 20):
            hazards.end(0, 1, bits, float(at), at + 30.0, used=at % 2 == 0)
        time += 100
        hazards.pass_by(10.0)
        _learn(hazards, float(time))
    assert 0 < hazards.worth(0, 0.0) < 1
    assert hazards._doublings - hazards._base < 300


def test_memory_of_what_is_under_way_is_fixed() -> None:
    hazards = Hazards([0, 1], [0, 0])
    begun = []
    for time in range(1000):
        hazards.learn(float(time))
        hazards.begin(time % 2, 3, 0.0, time + 0.5)
        begun.append((time % 2, time + 0.5))
    assert len(hazards._since) <= 128
    assert sum(hazards._cohorts) == 3000
    for of, when in begun:
        hazards.end(of, 3, 0.0, when, 2000.0, used=False)
    assert min(hazards._cohorts) == max(hazards._cohorts) == 0


def test_a_lesson_is_of_a_few_classes_at_a_time() -> None:
    hazards = Hazards(list(range(100)), [0] * 100)
    _observe(hazards, 0, [(of, 2.0 + of, True) for of in range(100)] * 3)
    hazards.learn(1000.0)
    taught = []
    for _ in range(10):
        before = [hazards.worth(of, 0.0) for of in range(100)]
        hazards.go_on()
        taught.append(sum(a != hazards.worth(of, 0.0) for of, a in enumerate(before)))
    assert max(taught) <= 16, taught
    assert sum(taught) == 100


@pytest.fixture
def taught() -> Learned:
    """A policy that has seen half of all sessions come back, none of those that were closed; "a",
    "b" and "c" are sessions of two keys, resident, that began at 2000 to 2002 seconds."""
    policy = Learned(4000)
    for turn in range(600):
        path: list[Key] = [f"s{turn}", f"t{turn}"]
        _request(policy, path, 3.0 * turn, Hints(closed=turn % 2 == 0))
        if turn % 2 and turn > 10:
            _request(policy, [f"s{turn - 10}", f"t{turn - 10}"], 3.0 * turn + 1)
    for at, session in enumerate("abc"):
        _request(policy, [session, session * 2], 2000.0 + at)
    return policy


def _request(policy: Learned, path: list[Key], time: float, hints: Hints = NO_HINTS) -> None:
    resident = set(policy._stretches.resident_in(path))
    for parent, key in zip([None, *path], path, strict=False):
        if key not in resident:
            policy.insert(key, parent, Access(time, hints))
    policy.touch(path, Access(time, hints))


def _order(policy: Learned) -> str:
    """Which of a, b and c goes when."""
    return "".join(key for key in policy.victims() if key in ("a", "b", "c"))


@pytest.mark.parametrize("session", "abc")
def test_a_session_that_is_said_to_be_closed_goes_before_others(
    taught: Learned, session: str
) -> None:
    taught.advise([session, session * 2], Access(2003.0, Hints(closed=True)))
    assert _order(taught)[0] == session


def test_what_somebody_went_on_from_is_not_over_because_one_was_closed(taught: Learned) -> None:
    _request(taught, ["c", "cc", "ccc"], 2003.0)
    before = list(taught.victims())
    taught.advise(["c", "cc"], Access(2003.0, Hints(closed=True)))
    assert list(taught.victims()) == before


@pytest.mark.parametrize("session", "abc")
def test_a_session_of_higher_priority_goes_later(taught: Learned, session: str) -> None:
    taught.advise([session, session * 2], Access(2003.0, Hints(priority=30)))
    assert _order(taught)[-1] == session


def test_what_will_be_needed_counts_as_used(taught: Learned) -> None:
    taught.advise(["a", "aa", "nobody knows"], Access(2003.0, Hints(will_need=True)))
    assert taught._stretches.at["aa"].uses == 2
    assert set(_order(taught)) == set("abc")


def test_a_branch_that_a_request_turned_off_before_is_learned_to_be_over() -> None:
    policy = Learned(4000)
    for turn in range(300):
        _request(policy, [f"s{turn}", f"left{turn}"], 4.0 * turn)
        _request(policy, [f"s{turn}", f"right{turn}"], 4.0 * turn + 1)
        if turn > 10:
            _request(policy, [f"s{turn - 10}", f"right{turn - 10}", f"more{turn}"], 4.0 * turn + 2)
    _request(policy, ["s", "old"], 1300.0)
    _request(policy, ["t", "left"], 1304.0)
    _request(policy, ["t", "right"], 1305.0)
    victims = list(policy.victims())
    assert victims.index("left") < victims.index("old") < victims.index("s")


def test_advice_about_unknown_keys_changes_nothing(taught: Learned) -> None:
    before = list(taught.victims())
    taught.advise(["x", "y"], Access(2003.0, Hints(closed=True, will_need=False)))
    taught.advise([], Access(2003.0, Hints(will_need=True)))
    assert list(taught.victims()) == before


def _branch(number: int) -> list[int]:
    path = [number]
    while path[-1]:
        path.append((path[-1] - 1) // 2)
    return path[::-1]
