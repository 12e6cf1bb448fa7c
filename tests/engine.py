"""An engine in a process of its own, told what to do by a test: one JSON object a line.

    with Engine(daemon.socket) as engine:
        engine.ask("serve", tokens=[...])      # -> {"lease": 1, "hit": 0, "tables": [[...]]}

The other half of this file, `main`, is that process.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from types import TracebackType
from typing import Any, Self

import tierd
from tests.content import LAYOUT, ask, check, prompt, row, serve, write
from tierd.errors import TierdError
from tierd.layout import KVLayout


class EngineError(Exception):
    """What the engine process raised."""


class Engine:
    """The test's end: a subprocess that has connected and attached a layout."""

    def __init__(
        self, path: Path, layout: KVLayout = LAYOUT, tenant: str = "", tier: str = "device"
    ) -> None:
        given = [str(path), json.dumps(layout.to_json()), tenant, tier]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.engine", *given],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def tell(self, verb: str, **arguments: Any) -> None:
        """Ask without waiting for the answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"verb": verb, **arguments}) + "\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """The answer to the oldest question. Raises EngineError."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the engine died"
        values: dict[str, Any] = json.loads(line)
        if "error" in values:
            raise EngineError(values["error"])
        return values

    def ask(self, verb: str, **arguments: Any) -> dict[str, Any]:
        self.tell(verb, **arguments)
        return self.answer()

    def kill9(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def __enter__(self) -> Self:
        self.answer()  # it has attached
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        if error is not None:
            self._process.kill()
        self._process.stdin.close()
        status = self._process.wait(30)
        self._process.stdout.close()
        assert error is not None or status in (0, -signal.SIGKILL), f"exit status {status}"


class Process:
    """The engine's end. Each public method is a verb."""

    def __init__(self, client: tierd.Client, pool: tierd.Pool) -> None:
        self._client, self._pool = client, pool
        self._leases: dict[int, tierd.Lease] = {}

    def serve(self, tokens: list[int]) -> dict[str, Any]:
        """Take the hit, write and commit the rest; the lease stays."""
        return self._kept(serve(self._pool, tokens))

    def acquire(self, tokens: list[int], room: int = 0) -> dict[str, Any]:
        """Only acquire, without waiting for the hit."""
        return self._kept(self._pool.acquire(tokens, room=room))

    def wait(self, lease: int) -> dict[str, Any]:
        held = self._leases[lease]
        held.wait()
        check(held)
        return {"hit": held.hit}

    def write(self, lease: int, start: int, stop: int) -> dict[str, Any]:
        write(self._leases[lease], start, stop)
        return {}

    def peek(self, group: int, block_id: int) -> dict[str, Any]:
        """The first and last byte of a place, whoever holds it."""
        place = row(self._pool, group, block_id)
        return {"bytes": [int(place[0]), int(place[-1])]}

    def poke(self, group: int, block_id: int, byte: int) -> dict[str, Any]:
        row(self._pool, group, block_id)[:] = byte
        return {}

    def release(self, lease: int) -> dict[str, Any]:
        self._leases.pop(lease).release()
        return {}

    def branch(self, tokens: list[int]) -> dict[str, Any]:
        """Serve a prompt, fork it twice, go on with one fork and suspend the other."""
        lease = serve(self._pool, tokens)
        one, two = self._pool.fork([(lease, len(tokens)), (lease, len(tokens))])
        one.extend(len(tokens) + 1)
        two.suspend(len(tokens))
        return {}

    def goodbye(self) -> dict[str, Any]:
        self._client.close()
        return {}

    def hang_up(self) -> dict[str, Any]:
        """Close the socket without a goodbye, and live on."""
        self._client._socket.close()
        return {}

    def fork(self) -> dict[str, Any]:
        """Leave a child behind that has the socket open too."""
        if child := os.fork():
            return {"pid": child}
        os.close(0)
        os.close(1)
        signal.pause()
        os._exit(0)

    def many(self, seed: int, requests: int, trunks: int, longest: int) -> dict[str, Any]:
        """Random prompts of a few trunks, every byte of every hit checked."""
        chance, hit, asked = Random(seed), 0, 0
        for _ in range(requests):
            tokens = prompt(chance.randrange(trunks), chance.randint(1, longest))
            hit, asked = hit + ask(self._pool, tokens), asked + len(tokens)
        return {"hit": hit, "asked": asked}

    def endless(self, trunks: int, longest: int) -> dict[str, Any]:
        """`many` until killed; says so before it begins."""
        print("{}", flush=True)
        while True:
            self.many(time.time_ns(), 10, trunks, longest)

    def _kept(self, lease: tierd.Lease) -> dict[str, Any]:
        self._leases[lease.number] = lease
        tables = [table.tolist() for table in lease.tables]
        return {"lease": lease.number, "hit": lease.hit, "tables": tables}


def main(path: str, layout: str, tenant: str, tier: str) -> None:
    client = tierd.connect(path, tenant=tenant, tier=tier)
    process = Process(client, client.attach(KVLayout.from_json(json.loads(layout))))
    print("{}", flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        verb: Callable[..., dict[str, Any]] = getattr(process, question.pop("verb"))
        try:
            told = verb(**question)
        except TierdError as error:
            told = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
