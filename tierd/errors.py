"""The exceptions that cross a module boundary, few and each with one meaning."""


class TierdError(Exception):
    """Every error of ours."""


class OutOfBlocks(TierdError):
    """A pool has too few free or evictable blocks. Nothing was changed."""


class DaemonLost(TierdError, ConnectionError):
    """The daemon is gone. What is mapped stays readable; nothing more can be asked of it."""


class ProtocolError(TierdError):
    """The other side does not speak our protocol, or broke it."""


class Refused(TierdError, PermissionError):
    """The daemon does not serve this user or tenant."""


class LayoutMismatch(TierdError, ValueError):
    """A layout differs from the one attached under the same name."""


class LeaseError(TierdError, ValueError):
    """A lease was used for what it does not allow: released, not ready, not this engine's."""


class ConfigError(TierdError, ValueError):
    """The configuration says what is not allowed; the message names file, key and value."""
