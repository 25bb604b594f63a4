"""The socket on which process 0 listens, and the addresses that it is bound to."""

import os
import socket
from ipaddress import ip_address


def bound_socket(host: str, port: int) -> socket.socket:
    """A socket bound to the coordinator's port on as few addresses as possible.

    If `host` is a numeric address of this host, the socket is bound to it alone. If
    `host` is a name, the socket is bound to all addresses of this host: other hosts may
    resolve the name to another address (on Debian a host resolves its own name to
    127.0.1.1), or the name may belong to a service in front of this host.
    """
    if is_own_address(host):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return _socket(family, (host, port))
    if socket.has_dualstack_ipv6():
        return _socket(socket.AF_INET6, ("", port))
    return _socket(socket.AF_INET, ("", port))


def _socket(family: socket.AddressFamily, address: tuple[str, int]) -> socket.socket:
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        # Allows binding a port right after an earlier run has ended. On Windows this
        # option would let two programs bind the same port.
        if os.name == "posix":
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6 and not address[0]:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        made.bind(address)
    except OSError:
        made.close()
        raise
    return made


def is_loopback(host: str) -> bool:
    """Whether only processes on this host can reach this address."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def is_own_address(host: str) -> bool:
    """Whether `host` is localhost or a numeric address of this host."""
    if is_loopback(host):
        return True
    try:
        family = socket.AF_INET6 if ip_address(host).version == 6 else socket.AF_INET
    except ValueError:
        return False
    try:
        _socket(family, (host, 0)).close()
    except OSError:
        return False
    return True
