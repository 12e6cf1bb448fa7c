"""The daemon's socket in the file system: bound, checked for a living owner, taken away again."""

import logging
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tierd.daemon.config import Config
from tierd.errors import ConfigError

log = logging.getLogger("tierd.listener")


@contextmanager
def listening(config: Config) -> Iterator[socket.socket]:
    """The daemon's socket; a stale one is replaced, and ours is taken away at the end."""
    path = config.socket
    made = not path.parent.exists()
    shared = any(uid != os.getuid() for t in config.tenants.values() for uid in t.uids)
    if made:
        path.parent.mkdir(parents=True, mode=0o755 if shared else 0o700)
    _clear_stale(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        listener.bind(str(path))
        path.chmod(0o666 if shared else 0o600)  # SO_PEERCRED decides who is served
        listener.listen(128)
        inode = path.stat().st_ino
        yield listener
    finally:
        listener.close()
        with suppress(OSError):
            if path.stat().st_ino == inode:
                path.unlink()
            if made:
                path.parent.rmdir()


def _clear_stale(path: Path) -> None:
    """Remove the socket of a daemon that is gone. Raises ConfigError if one is alive."""
    if not path.exists():
        return
    if not stat.S_ISSOCK(path.stat().st_mode):
        raise ConfigError(f"{path} exists and is no socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            log.info("%s was a stale socket", path)
        else:
            raise ConfigError(f"a daemon is listening on {path} already")
