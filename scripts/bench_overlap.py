"""Time to first token of a hit that lies on SSD: layers computed while others load, or after all.

A real daemon, started anew before every such request, so that nothing is above the SSD, whose reads
pass by the page cache; and SmolLM2 in fp32 on one thread, its 30 layers in 5 groups. A request has
1,000 tokens, of which a prefix is in the cache.

    load      [ g0 ][ g1 ][ g2 ][ g3 ][ g4 ]
    compute         | L0-5 | L6-11 | ...        instead of                  | L0-5 | L6-11 | ...

What overlap saves is the lesser of two times: loading once the first group is there, and computing
before the last group's layers. At this model's size, 46 KB of K and V a token, that is little:

    992 hit, 8 computed      46 MB to load, and a pass that only reads the weights takes about as
                             long: of both together, the saving is a part that can be seen
    512 hit, 488 computed    24 MB to load, and a pass that takes thirty times as long hides all of
                             it: of both together, the saving is a few hundredths at most

It grows with what is loaded for what is computed: larger K and V, slower media, faster processors.
The daemon needs a core beside the engine's to load meanwhile. `one group` is the default layout,
with a fifth of the blocks: it shows what groups cost.
"""

import random
import signal
from collections.abc import Callable
from functools import partial
from itertools import count
from statistics import median
from typing import Any

from bench_report import BenchReport, Figure
from bench_rounds import Rounds
from demo_stage import Engine, Stage

TOKENS = 1000
CASES = {992: "992 of 1,000 tokens hit", 512: "512 of 1,000 tokens hit"}
WAYS = ("overlap", "load all, then compute", "one group", "device hit")
NO_CACHE = "no cache"
CONFIG = """\
socket = "{folder}/tierd.sock"
device.size = "256MiB"
host.size = "256MiB"
ssd.path = "{folder}/ssd"
ssd.size = "4GiB"
ssd.slab = "16MiB"
"""


class Requests:
    """Requests of `TOKENS` tokens whose first ones are those of one prompt, and their times."""

    def __init__(self, on: Stage, prompt: list[int], grouped: Engine, plain: Engine) -> None:
        self._on, self._prompt = on, prompt
        self._engine, self._plain = grouped, plain
        self._seeds = count()
        self._first_token: set[int] = set()
        self.loads: dict[int, list[list[float]]] = {hit: [] for hit in CASES}

    def ask(self, do: str, hit: int, plain: bool = False) -> float:
        """Milliseconds to the first token, which is the same for all who ask for the prompt."""
        engine = self._plain if plain else self._engine
        answer = engine.ask(do, ids=self._ids(hit), num_tokens=1)
        if hit == max(CASES):
            self._first_token.update(answer["tokens"])
            assert len(self._first_token) == 1, f"not one first token: {self._first_token}"
        return float(answer["wall"]) * 1e3

    def ask_ssd(self, do: str, hit: int, plain: bool = False) -> float:
        """As `ask`, when all is on the SSD only."""
        self.push_down()
        return self.ask(do, hit, plain)

    def load(self, hit: int) -> float:
        """Milliseconds until the hit is loaded from SSD."""
        self.push_down()
        answer = self._engine.ask("load", ids=self._ids(hit))
        assert answer["hit"] == hit, f"a hit of {answer['hit']} tokens instead of {hit}"
        self.loads[hit].append([seconds * 1e3 for seconds in answer["ready"]])
        return self.loads[hit][-1][-1]

    def ask_device(self, do: str, hit: int) -> float:
        """As `ask`, when the hit is in the top tier."""
        self._engine.ask("load", ids=self._ids(hit))
        return self.ask(do, hit)

    def push_down(self) -> None:
        """Have everything on the SSD only: the daemon ends and begins again."""
        self._on.stop_daemon(signal.SIGTERM)
        self._on.start_daemon()
        for engine in (self._engine, self._plain):
            engine.ask("attach")

    def _ids(self, hit: int) -> list[int]:
        """The prompt's first `hit` tokens, then what nobody has asked before, or the same end."""
        if hit == max(CASES):
            return self._prompt
        tail = random.Random(next(self._seeds)).choices(range(1000, 40_000), k=TOKENS - hit)
        return self._prompt[:hit] + tail


def measure(report: BenchReport, on: Stage, quick: bool) -> None:
    """The daemon of `on` does not run yet; it will not be told to stop."""
    report.heading("Time to first token of a 1,000-token request, SmolLM2 in 5 layer groups, ms")
    facts: dict[str, Any] = on.prepare()
    prompt = facts["prompts"][0][:TOKENS]
    (on.folder / "tierd.toml").write_text(CONFIG.format(folder=on.folder))
    on.start_daemon()
    engines = on.start_engines(1, "bench_overlap_engine.py") + on.start_engines(1)
    for engine in engines:
        engine.ask("warm", ids=facts["prompts"][1])
        engine.ask("tierd", ids=prompt, num_tokens=1)
    requests = Requests(on, prompt, *engines)
    rounds = Rounds(_measures(requests), 3 if quick else 7)
    for hit, case in CASES.items():
        _add(report, rounds, case, hit)
        first = median(ready[0] for ready in requests.loads[hit])
        whole = median(ready[-1] for ready in requests.loads[hit])
        what = f"{case}: loading alone, last group"
        report.note(Figure(what, whole, first, "ms", "the first group"))
    for engine in engines:
        engine.leave()


def _measures(requests: Requests) -> dict[str, Callable[[], float]]:
    """By case and way."""
    measures: dict[str, Callable[[], float]] = {}
    for hit in CASES:
        ways = (
            partial(requests.ask_ssd, "tierd", hit),
            partial(requests.ask_ssd, "whole", hit),
            partial(requests.ask_ssd, "tierd", hit, plain=True),
            partial(requests.ask_device, "tierd", hit),
        )
        measures |= {f"{way} {hit}": ask for way, ask in zip(WAYS, ways, strict=True)}
        measures[f"load {hit}"] = partial(requests.load, hit)
    return measures | {NO_CACHE: partial(requests.ask, "stock", max(CASES))}


def _add(report: BenchReport, rounds: Rounds, case: str, hit: int) -> None:
    """Overlap beside the other ways, the ratios in pairs of one round."""
    ours = f"{WAYS[0]} {hit}"
    others = {way: f"{way} {hit}" for way in WAYS[1:]} | {NO_CACHE: NO_CACHE}
    for peer, other in others.items():
        medians, ratio = (rounds.median(ours), rounds.median(other)), rounds.ratio(ours, other)
        report.note(Figure(f"{case} on SSD, overlap", *medians, "ms", peer, ratio))
