"""How long requests are: a small histogram that only counts.

A length falls into one of four ranges to each doubling, so that there are never more than some
hundred counters; which requests they were is forgotten. It does not know what it is asked for.
"""

from collections.abc import Mapping

_BITS = 3  # leading ones of a length that are told apart


class Lengths:
    """Tokens of requests, by ranges."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}  # by the first length of a range

    def add(self, num_tokens: int) -> None:
        """One request more, of `num_tokens`, at least 1."""
        dropped = max(0, num_tokens.bit_length() - _BITS)
        first = num_tokens >> dropped << dropped
        self._counts[first] = self._counts.get(first, 0) + 1

    def counts(self) -> Mapping[int, int]:
        """Requests by the middle of the range that their length is in, ascending."""
        return {_middle(first): self._counts[first] for first in sorted(self._counts)}


def _middle(first: int) -> int:
    width = 1 << max(0, first.bit_length() - _BITS)
    return first + (width - 1) // 2
