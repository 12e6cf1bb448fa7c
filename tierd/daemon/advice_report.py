"""What advice says, for a person: a table, how sure it is, and a configuration to begin with."""

from collections.abc import Iterator, Sequence
from statistics import mean, stdev

from tierd.daemon.advice import Outcome
from tierd.daemon.lab import TIERS
from tierd.daemon.optimum import Optimum
from tierd.daemon.trace import Trace
from tierd.daemon.values import Size

_SHOWN = 8
_FEW_REQUESTS = 1000
_T95 = 2.3  # of ten parts


def table(found: Sequence[Outcome]) -> Iterator[str]:
    """The best of what was tried, and `lru` at the best one's sizes if it is not among them."""
    head = f"{'policy':<10} {'block':>6} " + " ".join(f"{name:>9}" for name in TIERS)
    yield (
        f"{head} {'hit %':>6} " + " ".join(f"{name:>6}" for name in TIERS) + "   warm  ms/1k tokens"
    )
    best = found[0].choice
    shown = list(found[:_SHOWN])
    shown += [
        one
        for one in found[_SHOWN:]
        if one.choice.policy == "lru"
        and one.choice.block_size == best.block_size
        and one.choice.sizes == best.sizes
    ]
    for one in shown:
        choice, rates = one.choice, iter(one.rates)
        sizes = " ".join(f"{_size(size):>9}" for size in choice.sizes)
        levels = [f"{100 * next(rates):6.2f}" if size else "     -" for size in choice.sizes]
        hits = " ".join([f"{100 * one.hit_rate:6.2f}", *levels, f"{100 * one.warm:6.2f}"])
        yield f"{choice.policy:<10} {choice.block_size:>6} {sizes} {hits} {1000 * one.cost:14.1f}"


def certainty(found: Sequence[Outcome], trace: Trace, granule: int) -> Iterator[str]:
    """How far the table may be trusted: it is of `trace`, which was read in blocks of `granule`."""
    requests, best = trace.requests, found[0]
    tokens = sum(request.num_tokens for request in requests)
    hours = (requests[-1].time - requests[0].time) / 3600
    yield f"From {len(requests)} requests of {tokens} tokens within {hours:.1f} hours."
    ceiling = Optimum(trace).hit_rate(trace.num_accesses) * trace.num_accesses * trace.block_size
    yield (
        f"No cache of any size could have had more than {ceiling / tokens:.1%} of the tokens: the "
        f"rest came for the first time. After a longer while fewer do; `warm` is the second half."
    )
    if all(request.num_hit is not None for request in requests):
        hit = sum(request.num_hit or 0 for request in requests)
        yield f"The daemon that recorded this hit {hit / tokens:.1%}, with whatever it had before."
    spread = _T95 * stdev(map(sum, _part_rates(best))) / len(best.asked) ** 0.5
    yield (
        f"In tenths of the trace the best hit {_range(best)}, so another trace like it may well "
        f"differ by {100 * spread:.1f} points."
    )
    if others := [one for one in found[1:] if one.choice.policy != best.choice.policy]:
        yield _against(best, others[0])
    if trace.block_size > granule:
        yield f"It is so long that hits were counted in steps of {trace.block_size} tokens."
    if len(requests) < _FEW_REQUESTS:
        yield f"That is little: record {_FEW_REQUESTS} requests or more before you rely on it."


def toml(best: Outcome, granule: int | None) -> Iterator[str]:
    """A configuration with the best choice, as `tierd config check` takes it."""
    choice = best.choice
    for name, size in zip(TIERS, choice.sizes, strict=True):
        if size or name == "host":
            yield f"[{name}]"
            yield from ['path = "~/.cache/tierd"'] * (name == "ssd")
            yield f"size = {Size.form(size)}"
            yield from [f'policy = "{choice.policy}"', ""] if size else [""]
    yield "[blocks]"
    yield 'policy = "uniform"'
    if granule is not None:
        yield f"granule = {granule}"
    yield "[blocks.options]"
    yield f"size = {choice.block_size}"


def _against(best: Outcome, other: Outcome) -> str:
    """Whether the best is better than another beyond what parts differ by."""
    pairs = zip(best.costs(), other.costs(), strict=True)
    gains = [theirs - ours for ours, theirs in pairs]
    better = sum(gain > 0 for gain in gains)
    sure = mean(gains) > _T95 * stdev(gains) / len(gains) ** 0.5
    verdict = "beyond chance" if sure else "which may be chance"
    return (
        f"{best.choice.policy} was better than {other.choice.policy} in {better} of "
        f"{len(gains)} tenths, {verdict}."
    )


def _part_rates(outcome: Outcome) -> list[list[float]]:
    pairs = zip(outcome.asked, outcome.hits, strict=True)
    return [[hit / max(1, asked) for hit in hits] for asked, hits in pairs]


def _range(outcome: Outcome) -> str:
    rates = [sum(of) for of in _part_rates(outcome)]
    return f"{min(rates):.1%} to {max(rates):.1%}"


def _size(nbytes: int) -> str:
    return Size.form(nbytes).strip('"') if nbytes else "-"
