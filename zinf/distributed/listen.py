"""Where process 0 listens: at as few of its host's addresses as is certain."""

import os
import socket
from ipaddress import ip_address


def bound_socket(host: str, port: int) -> socket.socket:
    """A socket bound to the coordinator's port, at as few addresses as is certain.

    A numeric address of this host is bound alone. A name may mean another address on
    another host (on Debian a host's own name is 127.0.1.1), or a service in front of
    this host, so with a name all addresses are bound.
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
        # A port that a process of an earlier run has just left is free; on Windows the
        # option would let two programs have one port.
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
    """Whether only processes of this host reach an address."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def is_own_address(host: str) -> bool:
    """Whether this is an address of this host, and not a name that has several."""
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
