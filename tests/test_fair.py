"""Who gives way to whom: arithmetic, by numbers."""

from tierd.daemon.fair import Claim, can_spare, donors, fair_share, yielding


def claim(
    owner: str, nbytes: int, weight: float = 1, floor: int = 0, *, active: bool = True
) -> Claim:
    return Claim(owner, nbytes, weight, floor, active)


def who(needy: Claim, *others: Claim) -> list[object]:
    return [donor.owner for donor in donors(needy, [needy, *others], 100)]


def test_a_fair_share_is_by_weight_among_those_with_engines() -> None:
    claims = [claim("a", 0, 1), claim("b", 0, 3), claim("c", 90, 5, active=False)]
    assert [fair_share(of, claims, 100) for of in claims] == [25, 75, 0]


def test_who_has_too_little_takes_from_who_has_the_most_above_its_share() -> None:
    assert who(claim("a", 10), claim("b", 40), claim("c", 50)) == ["c", "b"]


def test_who_has_a_fair_share_takes_from_nobody_that_has_engines() -> None:
    assert who(claim("a", 50), claim("b", 50)) == []
    assert who(claim("a", 60), claim("b", 40)) == []


def test_who_has_no_engine_gives_first_and_to_anybody() -> None:
    assert who(claim("a", 60), claim("b", 20), claim("c", 20, active=False)) == ["c"]
    assert who(claim("a", 10), claim("b", 70), claim("c", 20, active=False)) == ["c", "b"]


def test_nobody_gives_below_its_floor() -> None:
    assert who(claim("a", 10), claim("b", 90, floor=90)) == []
    assert who(claim("a", 10), claim("b", 90, floor=90, active=False)) == []
    assert who(claim("a", 10), claim("b", 90, floor=89)) == ["b"]


def test_weights_decide_who_has_too_much() -> None:
    assert who(claim("a", 20, 1), claim("b", 80, 4)) == []
    assert who(claim("a", 19, 1), claim("b", 81, 4)) == ["b"]


def test_what_would_be_taken_back_at_once_is_not_given() -> None:
    a, b, idle = claim("a", 70), claim("b", 20), claim("c", 10, active=False)
    claims = [a, b, idle]
    assert can_spare(a, 20, b, claims, 100)  # 50 is its fair share
    assert not can_spare(a, 21, b, claims, 100)
    assert can_spare(idle, 10, b, claims, 100)


def test_who_has_nothing_gets_something_but_nothing_of_a_floor() -> None:
    a, b = claim("a", 50, floor=30), claim("b", 0)
    assert can_spare(a, 20, b, [a, b], 100)
    assert not can_spare(a, 21, b, [a, b], 100)


def test_when_the_medium_shrinks_floors_go_last_and_who_has_no_engine_first() -> None:
    claims = [
        claim("a", 30),
        claim("b", 45),
        claim("c", 5, active=False),
        claim("d", 20, floor=20),
        claim("e", 0),
    ]
    assert [of.owner for of in yielding(claims, 50)] == ["c", "b", "a", "d"]
