"""Requests of proper engines that ask for what there is not: an error, and nothing has changed."""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import tierd
from tests.content import BLOCK, BLOCKS, LAYOUT, ask, prompt, serve, write
from tests.daemon import Daemon, tiers
from tests.healthy import nothing_lost
from tests.wire import HASHES, Wire, told
from tierd import protocol
from tierd.errors import DaemonLost, LayoutMismatch, LeaseError, OutOfBlocks, Refused
from tierd.layout import KVLayout
from tierd.protocol import Kind, Op, StepRequest


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """One daemon takes it all."""
    with Daemon(tmp_path_factory.mktemp("battered")) as running:
        yield running


def test_nothing_is_acquired_before_a_layout_is_attached(daemon: Daemon) -> None:
    with nothing_lost(daemon), Wire(daemon.socket) as wire:
        wire.hello()
        for op, body in (
            (Op.ACQUIRE, protocol.dump_acquire(1, BLOCK, BLOCK, HASHES[:1])),
            (Op.ADVANCE, protocol.dump_steps([StepRequest(1, 0, 16, [])])),
            (Op.RELEASE, protocol.dump_leases([1])),
        ):
            assert told(wire.ask(op, body)) == "LeaseError: attach a layout first"
        assert wire.ask(Op.STATUS, b"{}").kind == Kind.REPLY


def test_a_layout_that_does_not_match_names_the_field(daemon: Daemon) -> None:
    other = KVLayout("model", 4, 2, 64, "bfloat16", revision="r2")
    with nothing_lost(daemon), daemon.client() as client:
        with pytest.raises(LayoutMismatch) as caught:
            client.attach(other)
        for text in ("'model'", "dtype 'bfloat16' != 'float32'", "revision 'r2' != 'r1'"):
            assert text in str(caught.value)
        assert "head_dim" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"num_layers": 0}, "num_layers must be"),
        ({"num_layers": 2.5}, "num_layers must be"),
        ({"num_layers": 10**13}, "bytes, the device tier has 2097152"),
        ({"num_kv_heads": 10**13}, "bytes, the device tier has 2097152"),
        ({"num_kv_heads": 100}, "a block of group 0 takes 3276800 bytes, the device tier has"),
        ({"head_dim": "many"}, "head_dim must be"),
        ({"dtype": "int3"}, "dtype 'int3' is not one of float32"),
        ({"windows": [1]}, "1 windows given for 4 layers"),
        ({"groups": [{"layers": [0], "block_size": 16}]}, "groups cover layers"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_a_layout_that_is_none_is_refused(
    daemon: Daemon, change: dict[str, object], error: str
) -> None:
    with nothing_lost(daemon), Wire(daemon.socket) as wire:
        wire.hello()
        layout = LAYOUT.to_json() | {"model": "odd"} | change
        assert error in told(wire.ask(Op.ATTACH, protocol.dump({"layout": layout})))


def test_a_fence_without_a_gpu_is_refused(daemon: Daemon) -> None:
    with nothing_lost(daemon), Wire(daemon.socket) as wire:
        wire.hello()
        body = protocol.dump({"layout": LAYOUT.to_json(), "fence": "00" * 64})
        assert "the device tier lies on no GPU" in told(wire.ask(Op.ATTACH, body))


def test_one_layout_under_two_names_is_one_namespace(daemon: Daemon) -> None:
    with daemon.client() as a, daemon.client() as b:
        first, second = a.attach(LAYOUT, "chat"), b.attach(LAYOUT, "batch")
        ask(first, prompt(1, 4 * BLOCK))
        assert ask(second, [*prompt(1, 4 * BLOCK), 7]) == 4 * BLOCK
        assert len(daemon.status()["tenants"][0]["namespaces"]) == 1


def test_a_prompt_larger_than_the_device_tier_names_group_and_counts(daemon: Daemon) -> None:
    with nothing_lost(daemon) as pool, pytest.raises(OutOfBlocks) as caught:
        pool.acquire(range((BLOCKS + 1) * BLOCK))
    assert str(caught.value).startswith("group 0 (layers 0 to 3): need 33 blocks of 16 tokens")
    assert "at tier 'device', which holds 32" in str(caught.value)


def test_a_full_pool_refuses_and_changes_nothing(daemon: Daemon) -> None:
    with nothing_lost(daemon) as pool, serve(pool, prompt(2, 28 * BLOCK)) as lease:
        full = tiers(daemon.status())
        with pytest.raises(OutOfBlocks, match=r"need 1 blocks .* 0 free, .* 0 free or evictable"):
            pool.acquire([7])
        with pytest.raises(OutOfBlocks, match="group 0"):
            lease.extend(29 * BLOCK)
        lease.append([7])
        with pytest.raises(OutOfBlocks, match="group 0"):
            pool.advance([(lease, 28 * BLOCK, 28 * BLOCK + 1)])
        assert tiers(daemon.status()) == full
        assert lease.room == 28 * BLOCK


def test_a_lease_belongs_to_its_connection_and_ends_once(daemon: Daemon) -> None:
    with nothing_lost(daemon) as pool, Wire(daemon.socket).attach() as wire:
        with pool.acquire(prompt(3, BLOCK)) as lease:
            number = protocol.dump_leases([lease.number])
            assert "is not one of this connection's" in told(wire.ask(Op.RELEASE, number))
            step = protocol.dump_steps([StepRequest(lease.number, 0, 99, [])])
            assert "is not one of this connection's" in told(wire.ask(Op.ADVANCE, step))
        with pytest.raises(LeaseError, match="is released"):
            lease.release()
        with pytest.raises(LeaseError, match="is released"):
            lease.commit(1)
        assert wire.acquire(1, BLOCK, BLOCK, HASHES[:1]).kind == Kind.REPLY
        twice = protocol.dump_leases([1, 1])
        assert "named twice" in told(wire.ask(Op.RELEASE, twice))
        assert wire.ask(Op.RELEASE, protocol.dump_leases([1])).kind == Kind.REPLY
        assert "or is released" in told(wire.ask(Op.RELEASE, protocol.dump_leases([1])))


def test_a_lease_commits_no_more_than_it_has_room_and_names_for(daemon: Daemon) -> None:
    with nothing_lost(daemon) as pool, Wire(daemon.socket).attach() as wire:
        with pool.acquire(prompt(3, BLOCK)) as lease:
            with pytest.raises(LeaseError, match="cannot commit 17 tokens"):
                lease.commit(BLOCK + 1)
            write(lease, 0, BLOCK)
        assert wire.acquire(1, BLOCK, BLOCK, HASHES[:1]).kind == Kind.REPLY
        for committed, hashes, error in (
            (2 * BLOCK, HASHES[1:2], "cannot commit 32 tokens, the lease has room for 16"),
            (2**32 - 1, [], "the lease has room for 16"),
        ):
            step = protocol.dump_steps([StepRequest(1, committed, 0, hashes)])
            assert error in told(wire.ask(Op.ADVANCE, step))
        step = protocol.dump_steps([StepRequest(1, 0, 4 * BLOCK, [])])
        assert wire.ask(Op.ADVANCE, step).kind == Kind.REPLY
        step = protocol.dump_steps([StepRequest(1, 3 * BLOCK, 0, HASHES[1:2])])
        assert "hashes are missing to commit 48 tokens" in told(wire.ask(Op.ADVANCE, step))
        step = protocol.dump_steps([StepRequest(1, 0, 0, [])] * 2)
        assert "a lease is named twice" in told(wire.ask(Op.ADVANCE, step))
        wire.ask(Op.GOODBYE, b"{}")


def test_a_lease_number_is_used_once_at_a_time(daemon: Daemon) -> None:
    with nothing_lost(daemon), Wire(daemon.socket).attach() as wire:
        assert wire.acquire(1, BLOCK, BLOCK, HASHES[:1]).kind == Kind.REPLY
        assert told(wire.acquire(1, BLOCK, BLOCK, [])) == "LeaseError: lease 1 is in use"
        assert "0 hashes are too few for 17" in told(wire.acquire(2, 17, 17, []))
        assert "a prompt of 0 tokens in room for 1" in told(wire.acquire(2, 0, 1, []))
        assert "a prompt of 2 tokens in room for 1" in told(wire.acquire(2, 2, 1, []))
        wire.ask(Op.GOODBYE, b"{}")


def test_a_prompt_that_names_a_block_twice_is_refused(daemon: Daemon) -> None:
    """It would load one block into two places."""
    with nothing_lost(daemon) as pool, Wire(daemon.socket).attach() as wire:
        assert wire.acquire(1, BLOCK, BLOCK, HASHES[:1]).kind == Kind.REPLY
        step = protocol.dump_steps([StepRequest(1, BLOCK, 0, [])])
        assert wire.ask(Op.ADVANCE, step).kind == Kind.REPLY
        assert wire.ask(Op.RELEASE, protocol.dump_leases([1])).kind == Kind.REPLY
        with pool.acquire(prompt(2, 28 * BLOCK)):
            pass  # pushes it out of the device
        refused = wire.acquire(2, 2 * BLOCK + 1, 3 * BLOCK, [HASHES[0], HASHES[0]])
        assert told(refused) == "LeaseError: a prompt names a block twice"
        wire.ask(Op.GOODBYE, b"{}")


def test_an_empty_prompt_is_the_callers_mistake(daemon: Daemon) -> None:
    with nothing_lost(daemon) as pool, pytest.raises(ValueError, match="at least one"):
        pool.acquire([])


# -- who may connect, and where ------------------------------------------------------------------


def test_an_unknown_tenant_is_refused(daemon: Daemon) -> None:
    before = daemon.status()["refused"]
    with nothing_lost(daemon), pytest.raises(Refused, match="there is no tenant 'somebody'"):
        daemon.client(tenant="somebody")
    assert daemon.status()["refused"] == before + 1


FOREIGNER = """
import os, sys, tierd.client
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
try:
    tierd.connect(sys.argv[1])
except tierd.TierdError as error:
    print(type(error).__name__, error)
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
@pytest.mark.parametrize(
    ("uids", "error"),
    [
        ("[0, 12345]", "Refused uid 65534 is not served"),
        ("[0]", "DaemonLost no daemon answers at .*: .*Permission denied"),
    ],
)
def test_a_foreign_user_is_refused(uids: str, error: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)  # others may enter
        tenants = f"[tenants.us]\nuids = {uids}\n"
        with Daemon(Path(folder), more=tenants) as daemon, nothing_lost(daemon):
            assert re.match(error, output_of(FOREIGNER, daemon))


def output_of(script: str, daemon: Daemon) -> str:
    ran = subprocess.run(
        [sys.executable, "-c", script, daemon.socket], stdout=subprocess.PIPE, text=True, check=True
    )
    return ran.stdout


def test_where_no_daemon_is_the_client_says_so(tmp_path: Path) -> None:
    with pytest.raises(DaemonLost, match=r"no daemon answers at .*nowhere.sock: .*No such file"):
        tierd.connect(tmp_path / "nowhere.sock")


FORKED = """
import os, sys, tierd
client = tierd.connect(sys.argv[1])
if os.fork() == 0:
    try:
        client.status()
    except tierd.TierdError as error:
        print(type(error).__name__, error, flush=True)
    client.close()
    os._exit(0)
os.wait()
print("its parent is served by", client.status()["pid"])
client.close()
"""


def test_a_forked_process_must_connect_for_itself(daemon: Daemon) -> None:
    """And it takes nothing from its parent by closing its copy."""
    assert output_of(FORKED, daemon).splitlines() == [
        "LeaseError a forked process must connect for itself",
        f"its parent is served by {daemon.pid}",
    ]
