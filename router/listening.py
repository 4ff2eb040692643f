"""Sockets that listen: alone on a port, or several processes on one (SO_REUSEPORT)."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket

from router.config import ConfigError

# Connections that wait in the kernel to be let in.
BACKLOG = 1024


def listen(host: str, port: int, *, together: bool = False) -> socket.socket:
    """A socket that listens. `together`: beside other processes of this router. Raises ConfigError; a port that
    somebody else holds must not look like ours."""
    listening = _bound(host, port, together=together)
    try:
        listening.listen(BACKLOG)
    except OSError as error:
        listening.close()
        raise _refused(host, port, error) from None
    return listening


def reserve(host: str, port: int) -> socket.socket:
    """A socket that holds a port for other processes to listen on, and takes no connection itself. Raises ConfigError
    where somebody else listens there already, together with others or not."""
    listen(host, port).close()
    return _bound(host, port, together=True)


def reason(error: OSError) -> str:
    """The system's words for an error, without what libraries wrap around them."""
    known = error.errno is not None and error.errno > 0
    return (os.strerror(error.errno) if known else error.strerror or str(error)).lower()  # type: ignore[arg-type]


def loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def url(address: tuple[str, int], *, tls: bool = False) -> str:
    host, port = address
    return f"{'https' if tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


def _bound(host: str, port: int, *, together: bool) -> socket.socket:
    try:
        family, kind, proto, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigError(f"--host {host} is no address of this machine: {reason(error)}") from None
    bound = socket.socket(family, kind, proto)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if together:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound.setblocking(False)
        bound.bind(where)
    except OSError as error:
        bound.close()
        raise _refused(host, port, error) from None
    return bound


def _refused(host: str, port: int, error: OSError) -> ConfigError:
    other = "--host" if error.errno == errno.EADDRNOTAVAIL else "--port"
    return ConfigError(f"cannot listen on {host}:{port}: {reason(error)}; choose another {other}")
