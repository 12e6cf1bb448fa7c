"""The demo: two engines share one KV-cache through the daemon, across three tiers and two deaths.

Read `main`: it is the story. Every number is printed beside stock transformers' own, taken in the
same process just before; every token is compared with stock's.
"""

import argparse
import os
import random
import signal
import sys
import time
from contextlib import redirect_stdout
from dataclasses import replace
from typing import Any

from demo_report import Report, Row
from demo_stage import THREADS, Engine, Stage, stage

NUM_TOKENS = 16  # of each answer
BAR = 5.0  # times sooner to the first token than stock, on a hit of the system prompt
LEVELS = ("device", "host", "ssd")


class Demo:
    """The state of the story: the stage, the questions not yet asked, the report."""

    def __init__(self, on: Stage) -> None:
        self.stage, self.report = on, Report()
        texts = on.prepare()
        self.system: int = texts["system"]
        self.questions: list[list[int]] = texts["prompts"]
        self._chance = random.Random(7)
        self._stock: dict[int, dict[str, float]] = {}  # the best of each engine

    def question(self) -> list[int]:
        """A prompt that was not asked before: the system prompt and another question."""
        return self.questions.pop(0)

    def others(self, num_tokens: int) -> list[int]:
        """A prompt that shares nothing with any other."""
        return [self._chance.randrange(100, 40000) for _ in range(num_tokens)]

    def namespace(self) -> dict[str, Any]:
        """What status says of the model's namespace."""
        found: dict[str, Any] = self.stage.status()["tenants"][0]["namespaces"][0]
        return found

    def first_token(self, engine: Engine, name: str) -> Row:
        """Ask a question with stock's cache, then with ours; status says where the hit was."""
        ids = self.question()
        stock = engine.ask("stock", ids=ids, num_tokens=NUM_TOKENS)
        best = min(stock, self._stock.get(engine.pid, stock), key=lambda run: run["wall"])
        self._stock[engine.pid] = best
        before, cpu = self.namespace(), self.stage.daemon_cpu()
        first = engine.ask("tierd", ids=ids, num_tokens=1)
        after, cpu = self.namespace(), self.stage.daemon_cpu() - cpu
        answer = engine.ask("tierd", ids=ids, num_tokens=NUM_TOKENS)
        levels = zip(LEVELS, after["blocks_hit"], before["blocks_hit"], strict=True)
        tiers = [level for level, now, then in levels if now > then]
        return Row(
            name,
            hit=after["tokens_hit"] - before["tokens_hit"],
            tier="+".join(tiers) or "-",
            wall=first["wall"],
            cpu=first["cpu"],
            daemon_cpu=cpu,
            stock_wall=best["wall"],
            stock_cpu=best["cpu"],
            equal=answer["tokens"] == stock["tokens"] and first["tokens"] == stock["tokens"][:1],
            nbytes=[tier["nbytes_used"] for tier in after["tiers"]],
        )

    def hit(self, engine: Engine, name: str, tier: str, *, fast: bool = False) -> None:
        """A row whose whole hit must come from one tier."""
        self.add(self.first_token(engine, name), tier, fast=fast)

    def add(self, row: Row, tier: str, *, fast: bool = False) -> None:
        self.report.row(row)
        self.report.equal(f"{row.name}: {row.hit} of {self.system} shared tokens from", row.tier,
                          tier)  # fmt: skip
        if fast:
            self.report.faster(row, BAR)

    # -- the acts ------------------------------------------------------------------------------

    def cold(self, engine: Engine) -> None:
        """Nobody has computed the system prompt; then it is there for the engine's own."""
        self.hit(engine, "cold (engine A)", "-")
        for turn in ("second", "third"):
            self.hit(engine, f"A's own {turn} prompt", "device")

    def device(self, engine: Engine) -> None:
        """Another process finds it in the device tier: the median of three."""
        rows = [self.first_token(engine, "device hit (engine B)") for _ in range(3)]
        row = sorted(rows, key=lambda row: row.wall)[1]
        stock = min(rows, key=lambda row: row.stock_wall)
        row = replace(row, stock_wall=stock.stock_wall, stock_cpu=stock.stock_cpu)
        equal = all(row.equal for row in rows)
        self.add(replace(row, equal=equal), "device", fast=True)

    def push_down(self, engine: Engine, *tiers: str) -> None:
        """Send as many tokens of other prompts through as, by status, these tiers hold: what is
        older than all of them is then below."""
        tenant = self.stage.status()["tenants"][0]
        (group,) = tenant["namespaces"][0]["layout"]["groups"]
        (facts,) = tenant["namespaces"][0]["tiers"][0]["groups"]
        blocks = sum(tenant["memory"][tier]["nbytes"] // facts["block_nbytes"] for tier in tiers)
        want, sent = blocks * group["block_size"], 0
        while sent < want:
            sent += len(ids := self.others(1024))
            engine.ask("tierd", ids=ids, num_tokens=1)
        print(f"  {sent} tokens of other prompts went through tier {' and '.join(tiers)}")

    def kill_engine(self, engine: Engine) -> None:
        """Engine A dies in mid-generation; everything it held is back before a second is over."""
        engine.send("tierd", ids=self.others(200), num_tokens=400)
        while (held := self._held(engine.pid)) < 200 // 16 + 3:  # 32 tokens into its answer
            pass
        engine.process.kill()
        begin = time.perf_counter()
        while (left := self._held(engine.pid)) or self._in_use():
            if time.perf_counter() - begin > 10:
                break
        took = time.perf_counter() - begin
        self.report.equal(f"engine A killed with {held} blocks in its lease: blocks left", left, 0)
        self.report.at_most("engine A killed: its blocks are back after", took, 1.0)
        engine.process.wait()

    def _held(self, pid: int) -> int:
        sessions = self.stage.status()["sessions"]
        return sum(s["blocks"] + s["quarantined"] for s in sessions if s["pid"] == pid)

    def _in_use(self) -> int:
        groups = [g for tier in self.namespace()["tiers"] for g in tier["groups"]]
        return sum(g["private"] + g["quarantined"] for g in groups)

    def restart(self, engine: Engine, how: signal.Signals, name: str) -> None:
        """The daemon ends and comes again; what it serves then was on the SSD."""
        ended = self.stage.stop_daemon(how)
        ready = self.stage.start_daemon()
        engine.ask("attach")
        print(f"  daemon gone after {ended:.2f} s, ready again after {ready:.2f} s")
        self.report.at_most(f"{name}: ready after", ready, 2.0)
        self.hit(engine, name, "ssd", fast=True)
        self.report.equal(f"{name}: blocks that fail their checksum", self.namespace()["lost"], 0)

    def leave(self, engine: Engine, shared_memory: set[str]) -> None:
        """Everybody leaves. What would still be there?"""
        self.report.equal("files open for writing outside the folder", self.stage.strays(), [])
        engine.leave()
        print(f"  daemon gone after {self.stage.stop_daemon(signal.SIGTERM):.2f} s")
        self.report.equal("processes left", self.stage.survivors(), [])
        self.report.equal("sockets left", [str(p) for p in self.stage.folder.glob("*.sock")], [])
        self.report.equal("left in /dev/shm", sorted(in_shared_memory() - shared_memory), [])


def in_shared_memory() -> set[str]:
    """What of this user's lies in /dev/shm."""
    return {e.name for e in os.scandir("/dev/shm") if e.stat().st_uid == os.getuid()}


def act(text: str) -> None:
    print(f"\n{text}", flush=True)


def play(on: Stage) -> Report:
    """The story, from the first prompt to the last process."""
    act("Preparing: SmolLM2-135M-Instruct from its GGUF file, and the prompts")
    before, demo = in_shared_memory(), Demo(on)
    act(
        f"1. The daemon: device 96 MiB, host 128 MiB, SSD 2 GiB; engines A and B, {THREADS} threads"
    )
    print(f"  daemon ready after {on.start_daemon():.2f} s")
    a, b = on.start_engines(2)
    for engine in (a, b):
        engine.ask("warm", ids=demo.others(1040))
    act(f"2. Engine A: prompts that share a system prompt of {demo.system} tokens")
    demo.cold(a)
    act("3. Engine B, another process: the same system prompt, other questions")
    demo.device(b)
    demo.push_down(b, "device")
    demo.hit(b, "host hit", "host")
    demo.push_down(b, "device", "host")
    demo.hit(b, "SSD hit", "ssd", fast=True)
    act("   tierd status")
    print(on.tierd("status", "--socket", str(on.socket)))
    act("4. Deaths")
    demo.kill_engine(a)
    demo.restart(b, signal.SIGTERM, "SSD after restart")
    demo.restart(b, signal.SIGKILL, "SSD after kill -9")
    act("5. The end")
    demo.leave(b, before)
    return demo.report


def main() -> int:
    """Play it; 0 if everything held."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", metavar="FILE", help="write one line a check; - for stdout")
    arguments = parser.parse_args()
    with redirect_stdout(sys.stderr if arguments.json == "-" else sys.stdout):
        report = perform()
    if arguments.json:
        report.write(arguments.json)
    return 0 if report.ok else 1


def perform() -> Report:
    """The story, its table and its sum."""
    begin = time.perf_counter()
    with stage() as on:
        report = play(on)
    report.equal("the demo's folder is gone", not on.folder.exists(), True)
    print(f"\n{report.table()}\n")
    failed = [check.check for check in report.checks if not check.ok]
    took = time.perf_counter() - begin
    verdict = f"FAILED: {'; '.join(failed)}" if failed else "all hold"
    print(f"{len(report.checks)} checks, {verdict}. It took {took:.0f} s.")
    return report


if __name__ == "__main__":
    raise SystemExit(main())
