"""Fair shares: who of those that share a medium gives way to whom.

Everybody may take what is free. Once nothing is, who holds less than a fair share may take from who
holds more, and anybody may take from who has no engine; nobody gives what is below its floor.

    fair share of c = nbytes of the medium * weight of c / weights of all that have engines

Pure arithmetic over claims; it knows no pools.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Claim:
    """What one pool holds of a medium, and what it may. Sizes in bytes."""

    owner: Hashable
    nbytes: int
    weight: float
    floor: int
    active: bool  # engines are attached


def fair_share(of: Claim, claims: Sequence[Claim], nbytes: int) -> float:
    """The bytes that are fairly one claim's; none for who has no engine."""
    if not of.active:
        return 0.0
    return nbytes * of.weight / sum(claim.weight for claim in claims if claim.active)


def can_spare(giver: Claim, part: int, needy: Claim, claims: Sequence[Claim], nbytes: int) -> bool:
    """Whether `giver` has `part` bytes to give: not of its floor, nor, if it has engines, of its
    fair share, or the two would take them from each other in turns. Who has nothing at all gets
    something of that, too, but not the last of it."""
    left = giver.nbytes - part
    if left < giver.floor:
        return False
    if not giver.active or left >= fair_share(giver, claims, nbytes):
        return True
    return not needy.nbytes and left > 0


def donors(needy: Claim, claims: Sequence[Claim], nbytes: int) -> list[Claim]:
    """Who gives `needy` room, in the order to be asked: who has no engine, then who holds the most
    above its fair share."""
    entitled = needy.nbytes < fair_share(needy, claims, nbytes)
    giving = [
        (other.active, other.nbytes - fair_share(other, claims, nbytes), other)
        for other in claims
        if other is not needy and other.nbytes > other.floor
    ]
    willing = [(a, over, o) for a, over, o in giving if not a or (entitled and over > 0)]
    return [other for _, _, other in sorted(willing, key=lambda g: (g[0], -g[1]))]


def yielding(claims: Sequence[Claim], nbytes: int) -> list[Claim]:
    """Who gives something up when the medium shrinks to `nbytes`, in the order to be asked: who is
    above its floor, of those who has no engine, then who holds the most above its fair share."""

    def order(claim: Claim) -> tuple[bool, bool, float]:
        over = claim.nbytes - fair_share(claim, claims, nbytes)
        return claim.nbytes <= claim.floor, claim.active, -over

    return sorted((claim for claim in claims if claim.nbytes), key=order)
