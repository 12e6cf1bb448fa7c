"""The configuration: what a bad file is told."""

from pathlib import Path

import pytest

from tierd.daemon.config import Config
from tierd.errors import ConfigError

SIZE = 'must be a size: bytes as an integer, or a string such as "96MiB", with one of B, KB, MB'
EXTENT = 'must be from "2MiB" to'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        # Keys
        (
            "sockt = 1",
            "sockt: is not a key; known: socket, grace, quarantine_grace, max_frame, dev",
        ),
        (
            "sockt = 1",
            "ssd, blocks, prefetch, placement, trace, tenants, models, rules; did you mean socket?",
        ),
        ("zzz = 1", "blocks, prefetch, placement, trace, tenants, models, rules\n"),
        ("[prefetch]\nwithin = 1", "prefetch.within: is not a key; known: policy, options\n"),
        (
            "[device]\nsise = 1",
            "device.sise: is not a key; known: size, policy, options, reserve, watermarks, ",
        ),
        (
            '[host]\nstore = "cpu"',
            "host.store: is not a key; known: size, policy, options, reserve, watermarks\n",
        ),
        ("[device]\nwatermarks = [0.2, 0.1]", "must be a list of two numbers, the first not above"),
        ("[device]\nwatermarks = 0.1", "must be a list of two numbers"),
        ("[host]\nwatermarks = [0, 2]", "must be a number from 0 to 1"),
        ("[ssd]\nsize = 1", "ssd.path: is missing, and has no default"),
        ("[tenants.a]\nuids = [1]\nshares = 1", "tenants.a.shares: is not a key; known: uids, sh"),
        ("[models.a]\nweight = 0", "models.a.weight = 0: must be a number above 0"),
        ('[models."a b"]\nfloor = -1', 'models."a b".floor = -1: must be'),
        ("[trace]\nsize = 5", "trace.path: is missing, and has no default"),
        ('trace.path = "trace"', 'trace.path = "trace": must be an absolute path'),
        ("device = 5", "device = 5: must be a table"),
        ("ssd = true", "ssd = true: must be a table"),
        # Sizes
        ('[device]\nsize = "12 XB"', f'device.size = "12 XB": {SIZE}'),
        ('[device]\nsize = "12 mib"', f'device.size = "12 mib": {SIZE}'),
        ('[device]\nsize = "MiB"', f'device.size = "MiB": {SIZE}'),
        ('[device]\nsize = "-1MiB"', f'device.size = "-1MiB": {SIZE}'),
        ('[device]\nsize = ""', f'device.size = "": {SIZE}'),
        ('[device]\nsize = "٤MiB"', f'device.size = "٤MiB": {SIZE}'),
        ("[device]\nsize = true", f"device.size = true: {SIZE}"),
        ("[device]\nsize = 1.5", f"device.size = 1.5: {SIZE}"),
        ("[device]\nsize = [1]", f"device.size = [1]: {SIZE}"),
        ("[device]\nsize = 0", f"device.size = 0: {EXTENT}"),
        ("[device]\nsize = -4096", f"device.size = -4096: {EXTENT}"),
        ("[device]\nsize = 2097151", f"device.size = 2097151: {EXTENT}"),
        ("[device]\nsize = 9223372036854775807", EXTENT),
        ("[host]\nsize = 1", 'host.size = 1: must be 0, or from "2MiB" to'),
        ('[ssd]\npath = "/a"\nsize = 0', 'ssd.size = 0: must be from "1MiB" to'),
        ('[ssd]\npath = "/a"\nmin_free = -1', "ssd.min_free = -1: must be from 0 to"),
        ('[ssd]\npath = "/a"\nslab = 0', 'ssd.slab = 0: must be from "1MiB" to'),
        (
            '[ssd]\npath = "/a"\nsize = "8MiB"',
            'ssd.slab = "64MiB": must be at most the size, "8MiB"',
        ),
        ("max_frame = 16", 'max_frame = 16: must be from "64KiB" to "1GiB"'),
        # Numbers, strings and paths
        ("grace = -1", "grace = -1: must be a number from 0 to 86400"),
        ("grace = true", "grace = true: must be a number from 0 to 86400"),
        ('grace = "30"', 'grace = "30": must be a number from 0 to 86400'),
        ("quarantine_grace = nan", "quarantine_grace = nan: must be a number from 0 to 86400"),
        ("quarantine_grace = inf", "quarantine_grace = inf: must be a number from 0 to 86400"),
        ("socket = 5", "socket = 5: must be an absolute path, or start with ~/"),
        ('socket = "tierd.sock"', 'socket = "tierd.sock": must be an absolute path'),
        ('socket = "/\\u0000"', "must be an absolute path"),
        (f'socket = "/{"x" * 107}"', 'x": must be at most 107 bytes long'),
        ('[ssd]\npath = ""', 'ssd.path = "": must be an absolute path'),
        ('[ssd]\npath = "~nobody-here/x"', 'ssd.path = "~nobody-here/x": must be an absolute path'),
        # Policies and stores
        (
            '[device]\npolicy = "lur"',
            "device.policy = 'lur' is not installed in tierd.policies; in",
        ),
        ('[device]\npolicy = "lur"', "lru"),
        ('[host]\npolicy = ""', 'host.policy = "": must be a string, and not empty'),
        ("[host]\npolicy = 1", "host.policy = 1: must be a string, and not empty"),
        ('[host]\npolicy = "nowhere:X"', "host.policy = 'nowhere:X': cannot import nowhere"),
        ('[device]\nstore = "gpu"', "device.store = 'gpu' is not installed in tierd.stores; inst"),
        ('[device]\nstore = "gpu"', "cpu, cuda, host, ssd"),
        ('[ssd]\npath = "/a"\nstore = "cpu"', "ssd.store = 'cpu' is <class 'storage.device.CpuDe"),
        (
            "[device.options]\nghosts = 5",
            "device.options.ghosts: is not an option of LRU; known: n",
        ),
        ("[device.options]\ncapacity = 5", "device.options.capacity: is not an option of LRU"),
        ("[device]\noptions = 5", "device.options = 5: must be a table"),
        # Blocks
        (
            '[blocks]\npolicy = "unifrom"',
            "blocks.policy = 'unifrom' is not installed in tierd.block",
        ),
        (
            "[blocks.options]\nsise = 5",
            "blocks.options.sise: is not an option of Uniform; known: si",
        ),
        (
            '[prefetch]\npolicy = "next"\noptions = { depth = 0 }',
            "prefetch.options = {depth = 0}: depth = 0 is not an integer f",
        ),
        (
            "[prefetch.options]\ndepth = 1",
            "prefetch.options.depth: is not an option of Nothing; known: none",
        ),
        ('[prefetch]\npolicy = "lru"', "prefetch.policy = 'lru' is not installed in tierd.pref"),
        (
            '[ssd]\npath = "/a"\nadmission = "lru"',
            "ssd.admission = 'lru' is not installed in tierd.admissions; installed: all",
        ),
        (
            '[ssd]\npath = "/a"\nadmission_options = { last = 1 }',
            "ssd.admission_options.last: is not an option of Promising; known: least, memory",
        ),
        (
            '[ssd]\npath = "/a"\nadmission_options.least = 2',
            "ssd.admission_options = {least = 2}: least = 2 is not a number from 0 to 1",
        ),
        (
            '[placement]\npolicy = "lru"',
            "placement.policy = 'lru' is not installed in tierd.placements; installed: excl",
        ),
        (
            '[placement]\npolicy = "exclusive"\noptions.ratio = 0',
            "placement.options = {ratio = 0}: ratio = 0 is not a number above 0",
        ),
        ("[blocks.options]\nsize = 0", "blocks.options = {size = 0}: size = 0 is not an integer f"),
        ("[blocks.options]\nsize = true", "size = True is not an integer from 1 to 4096"),
        ('[blocks]\npolicy = "hierarchical"', "missing 1 required positional argument: 'sizes'"),
        (
            '[blocks]\npolicy = "hierarchical"\noptions.sizes = { "0-9" = 16, "5" = 8 }',
            "blocks.options = {sizes = {0-9 = 16, 5 = 8}}: layer ranges '0-9' and '5' overlap",
        ),
        ('[blocks]\npolicy = "hierarchical"\noptions.sizes = 5', "sizes = 5 is not a table of lay"),
        (
            '[blocks]\npolicy = "auto"\noptions = { smallest = 64, largest = 32 }',
            "blocks.options = {smallest = 64, largest = 32}: smallest = 64 is above largest = 32",
        ),
        ("[blocks]\ngranule = 0", "blocks.granule = 0: must be an integer from 1 to 4096"),
        ("[blocks]\ngranule = true", "blocks.granule = true: must be an integer"),
        # Tenants
        ("[tenants.a]\nshare = 1", "tenants.a.uids: is missing, and has no default"),
        ("[tenants.a]\nuids = []", "tenants.a.uids = []: must be a list of one or more integers"),
        ("[tenants.a]\nuids = 5", "tenants.a.uids = 5: must be a list of one or more integers"),
        ("[tenants.a]\nuids = [true]", "tenants.a.uids = [true]: must be an integer from 0 to"),
        ("[tenants.a]\nuids = [-1]", "tenants.a.uids = [-1]: must be an integer from 0 to"),
        (
            "[tenants.a]\nuids = [1]\nshare = 0",
            "tenants.a.share = 0: must be a number above 0 to 1",
        ),
        ("[tenants.a]\nuids = [1]\nshare = 1.1", "tenants.a.share = 1.1: must be a number above 0"),
        ('[tenants."a b"]\nuids = [1]', "the name 'a b' must be 1 to 32 letters, digits, _ or -"),
        ("[tenants]\na = 1", "tenants.a = 1: must be a table"),
        ("[tenants]", "the shares sum to 0; must be above 0 to 1"),
        ("[tenants.a]\nuids = [1]\n[tenants.b]\nuids = [2]", "the shares sum to 2; must be above"),
        # Rules
        ("rules = 5", "rules = 5: must be tables, each beginning with [[rules]]"),
        ("[[rules]]", "rules.1.policy: is missing, and has no default"),
        (
            '[[rules]]\npolicy = "lru"\n[[rules]]\npolicy = "lur"',
            "rules.2.policy = 'lur' is not installed in tierd.policies",
        ),
        (
            '[[rules]]\npolicy = "lru"\noptions = { a = 1 }',
            "rules.1.options.a: is not an option of LRU",
        ),
        ('[[rules]]\npolicy = "lru"\ntier = "gpu"', 'rules.1.tier = "gpu": must be one of "device'),
        ('[[rules]]\npolicy = "lru"\ntier = "ssd"', 'rules.1.tier = "ssd": there is no such tier'),
        (
            '[[rules]]\npolicy = "lru"\ntenant = "b"\n[tenants.a]\nuids = [1]',
            'rules.1.tenant = "b": there is no such tenant; there are a',
        ),
        (
            '[[rules]]\npolicy = "lru"\nattention = "local"',
            'rules.1.attention = "local": must be one of "full", "window"',
        ),
        ('[[rules]]\npolicy = "lru"\nlayers = "9-0"', 'rules.1.layers = "9-0": must be a range of'),
        ('[[rules]]\npolicy = "lru"\nlayers = 3', "rules.1.layers = 3: must be a range of layers"),
        (
            '[device]\nsize = "4MiB"\nreserve = "2MiB"',
            'device.reserve = "2MiB": must be at least the size, "4MiB"',
        ),
        # Not TOML
        ("[device", "is not TOML: Expected ']' at the end of a table declaration"),
        ("grace = 1\ngrace = 2", "is not TOML: Cannot overwrite a value"),
    ],
)
def test_a_mistake_is_named_with_file_key_value_and_what_is_allowed(
    tmp_path: Path, text: str, message: str
) -> None:
    file = tmp_path / "tierd.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        Config.load(file)
    said = str(caught.value)
    assert said.startswith(f"{file}: ")
    assert message in said + "\n"


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    file = tmp_path / "tierd.toml"
    with pytest.raises(
        ConfigError, match=r"tierd\.toml: cannot be read: No such file or directory"
    ):
        Config.load(file)
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        Config.load(file.parent)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"tierd\.toml: is not TOML: 'utf-8' codec can't decode"):
        Config.load(file)
