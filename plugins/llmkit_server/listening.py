"""The socket that the server listens on, bound before anything is loaded."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from llmkit.config import ServerConfig
from llmkit.errors import ConfigError


@contextmanager
def bound_socket(settings: ServerConfig) -> Iterator[socket.socket]:
    """A bound socket; a Unix socket's file, of mode 0700, is removed at the end. Raises ConfigError if it is taken."""
    if settings.uds is None:
        with contextlib.closing(_tcp(settings.host, settings.port)) as found:
            yield found
        return
    path = Path(settings.uds)
    with contextlib.closing(_unix(path)) as found:
        try:
            yield found
        finally:
            path.unlink(missing_ok=True)


def address_of(listening: socket.socket, settings: ServerConfig) -> str:
    """Where clients find it."""
    if settings.uds is not None:
        return f"unix:{settings.uds}"
    host, port = listening.getsockname()[:2]
    scheme = "http" if settings.ssl_certfile is None else "https"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _tcp(host: str, port: int) -> socket.socket:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ConfigError(f"server.host {host!r} is no address: {error.strerror or error}.") from None
    family, _, _, _, address = found[0]
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        # From here on another server cannot take the port; clients are answered once the model is loaded.
        listening.listen(2048)
    except OSError as error:
        listening.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"Port {port} on {host} is in use.", hint="Choose another with --port, or 0 for any."
            ) from None
        raise ConfigError(f"The server cannot listen on {host}:{port}: {error.strerror or error}.") from None
    return listening


def _unix(path: Path) -> socket.socket:
    _remove_stale(path)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o077)
    try:
        listening.bind(str(path))
    except OSError as error:
        listening.close()
        raise ConfigError(f"server.uds: the server cannot listen on {path}: {error.strerror or error}.") from None
    finally:
        os.umask(before)
    path.chmod(0o700)
    listening.listen(2048)
    return listening


def _remove_stale(path: Path) -> None:
    """Remove the socket of a server that has died. Raises ConfigError if the path is anything else."""
    try:
        mode = path.lstat().st_mode
    except OSError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError(f"server.uds: {path} exists and is no socket.")
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            path.unlink(missing_ok=True)
            return
    raise ConfigError(f"server.uds: another server listens on {path}.")
