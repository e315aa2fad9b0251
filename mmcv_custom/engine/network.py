"""Which network interface reaches the other machines of a run."""

import ipaddress
import socket
import struct
import sys
from array import array
from collections.abc import Iterator
from pathlib import Path

from torch.distributed import Store

__all__ = ['addresses_of', 'find_interface', 'list_interfaces']

_SIOCGIFCONF = 0x8912  # Linux: lists the IPv4 addresses
_IFREQ_BYTES = 40  # an entry is a name of 16 bytes and a socket address
_IF_INET6 = Path('/proc/net/if_inet6')  # Linux: lists the IPv6 addresses
_ANY_PORT = 9


def find_interface(
    store: Store, rank: int, world_size: int, master: str
) -> str | None:
    """Find the interface of this machine that reaches the other ones.

    It is the interface that packets to the first process's machine leave
    from. On that machine, whose own name often stands for a loopback address,
    it is the interface that packets to another machine leave from.

    A collective: it returns when every process has called it.

    Args:
        store: A store that the processes share; each sets one key.
        rank: The rank of this process.
        world_size: The number of processes.
        master: Name or address of the first process's machine.

    Returns:
        The name; the loopback's if all processes are on one machine. None
        if no interface is known to have the address, or off Linux.

    Raises:
        OSError: If there is no route to `master`.
    """
    address = _local_address(master)
    store.set(f'address/{rank}', str(address))
    addresses = [
        ipaddress.ip_address(store.get(f'address/{other}').decode())
        for other in range(world_size)
    ]
    elsewhere = [other for other in addresses if not other.is_loopback]
    if address.is_loopback and elsewhere:
        address = _local_address(str(elsewhere[0]))
    return dict(_list_addresses()).get(address)


def list_interfaces() -> str:
    """Name the interfaces of this machine with their addresses."""
    return ', '.join(f'{name} ({ip})' for ip, name in _list_addresses())


def addresses_of(interface: str) -> list[str]:
    """Return the addresses of an interface of this machine."""
    return [str(ip) for ip, name in _list_addresses() if name == interface]


def _local_address(
    host: str,
) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """The address from which packets to `host` leave this machine."""
    try:
        candidates = socket.getaddrinfo(
            host, _ANY_PORT, type=socket.SOCK_DGRAM
        )
    except socket.gaierror as error:
        raise OSError(f'no address of MASTER_ADDR={host!r}: {error}') from None
    for family, kind, protocol, _, target in candidates:
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.connect(target)  # chooses a route and sends nothing
            except OSError as error:
                failure = error
            else:
                return ipaddress.ip_address(probe.getsockname()[0])
    raise OSError(f'no route to MASTER_ADDR={host!r}: {failure}')


def _list_addresses() -> Iterator[tuple]:
    """Each address of this machine with the name of its interface."""
    if sys.platform != 'linux':
        return
    import fcntl  # not everywhere

    buffer = array('B', bytes(1 << 16))
    start, size = buffer.buffer_info()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack('iP', size, start)
        reply = fcntl.ioctl(probe, _SIOCGIFCONF, request)
    used, _ = struct.unpack('iP', reply)
    for offset in range(0, used, _IFREQ_BYTES):
        name, packed = struct.unpack_from('16s4x4s', buffer, offset)
        # A second address of an interface may have a label, as `eth0:1`.
        name = name.rstrip(b'\0').decode().partition(':')[0]
        yield ipaddress.IPv4Address(packed), name
    if _IF_INET6.is_file():
        for line in _IF_INET6.read_text().splitlines():
            packed, *_, name = line.split()
            yield ipaddress.IPv6Address(bytes.fromhex(packed)), name
