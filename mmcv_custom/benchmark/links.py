"""Machines that are network namespaces, and slow links between them."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from .endings import at_the_end

__all__ = [
    'BURST_BYTES',
    'DEVICE',
    'LinkError',
    'Rate',
    'address',
    'check_rights',
    'limit',
    'machines',
    'sent_bytes',
]

# Of each machine, to the others.
DEVICE = 'veth0'
_UNITS = {'kbit': 1e3, 'mbit': 1e6, 'gbit': 1e9}
_MAX_NODES = 254  # of one subnet
# Small, as a step may send that much at once, whatever the rate; but not less
# than the kernel's largest packets, which it would have to cut.
BURST_BYTES = 128 * 2**10
# Of a shell: remove those namespaces that are there.
_REMOVE = """
for name; do
    [ ! -e "/run/netns/$name" ] || ip netns del "$name"
done
"""


class LinkError(RuntimeError):
    """Links cannot be made here."""


@dataclass(frozen=True)
class Rate:
    """What a link carries in each direction.

    Attributes:
        name: As it was written, such as ``200mbit``.
        bits_per_s: Bits per second.
    """

    name: str
    bits_per_s: float

    @classmethod
    def parse(cls, text: str) -> 'Rate':
        """Read a rate as ``tc`` writes it.

        Raises:
            ValueError: For another unit, or no positive number.
        """
        number, unit = text[:-4], text[-4:].lower()
        with contextlib.suppress(ValueError):
            if unit in _UNITS and 0 < float(number) < float('inf'):
                return cls(text, float(number) * _UNITS[unit])
        raise ValueError(
            f'{text!r} is no rate; write a number and one of '
            f'{", ".join(_UNITS)}, such as 200mbit'
        )

    @property
    def bytes_per_s(self) -> float:
        """Bytes per second."""
        return self.bits_per_s / 8


def check_rights(number: int) -> None:
    """Check what can be checked before anything is made.

    Args:
        number: Of machines.

    Raises:
        LinkError: Without root, without ``ip`` and ``tc``, and for one
            machine or more than have an address.
    """
    if not 2 <= number <= _MAX_NODES:
        raise LinkError(
            f'--nodes {number}: links are between 2 to {_MAX_NODES} machines'
        )
    if os.geteuid() != 0:
        raise LinkError(
            'emulated links need root, for network namespaces; without '
            '--rate the processes talk over loopback'
        )
    missing = [name for name in ('ip', 'tc') if not shutil.which(name)]
    if missing:
        raise LinkError(
            f'emulated links need {" and ".join(missing)}: install iproute2'
        )


@contextlib.contextmanager
def machines(number: int, rates: Iterable[Rate] = ()) -> Iterator[list[str]]:
    """Make network namespaces, joined by a bridge in one of its own.

    Each has :data:`DEVICE`, its one link to the others. Its own address is
    reached over its loopback, as the kernel does with local addresses.

    Args:
        number: Of machines.
        rates: That links will be limited to; tried now, on none of them.

    Yields:
        Their names. All are gone afterwards, and if this process is killed.

    Raises:
        LinkError: If the kernel refuses one, or a rate, with what it says.
    """
    prefix = f'bench{os.getpid()}'
    names = [f'{prefix}-{node}' for node in range(number)]
    switch = f'{prefix}-switch'
    with at_the_end(_REMOVE, switch, *names):  # before they are there
        for name in (switch, *names):
            _run(f'ip netns add {name}')
        _run(f'ip -n {switch} link add bridge type bridge')
        _run(f'ip -n {switch} link set bridge up')
        for node, name in enumerate(names):
            _plug_in(node, name, switch)
        for rate in rates:
            limit(rate, switch, 'lo')
        yield names


def address(node: int) -> str:
    """Return the address that a machine has for the others."""
    return f'10.9.0.{node + 1}'


def limit(
    rate: Rate, machine: str | None = None, device: str = DEVICE
) -> None:
    """Limit what a machine sends, from now on.

    Args:
        rate: Of its link.
        machine: Its name; by default the one that this process is on.
        device: Of the machine, to the others.

    Raises:
        LinkError: If the kernel refuses it, with what it says.
    """
    bits = f'{rate.bits_per_s:.0f}bit'
    how = f'tbf rate {bits} burst {BURST_BYTES}b latency 400ms'
    where = '' if machine is None else f'-n {machine} '
    _run(f'tc {where}qdisc replace dev {device} root {how}')


def sent_bytes(device: str) -> int:
    """Return the bytes that have left over a device, by the kernel's count."""
    return int(
        Path(f'/sys/class/net/{device}/statistics/tx_bytes').read_text()
    )


def _plug_in(node: int, name: str, switch: str) -> None:
    port = f'port{node}'
    _run(
        f'ip link add {DEVICE} netns {name} type veth '
        f'peer name {port} netns {switch}'
    )
    _run(f'ip -n {switch} link set {port} master bridge up')
    _run(f'ip -n {name} addr add {address(node)}/24 dev {DEVICE}')
    _run(f'ip -n {name} link set {DEVICE} up')
    _run(f'ip -n {name} link set lo up')


def _run(command: str) -> None:
    result = subprocess.run(command.split(), capture_output=True, text=True)
    if result.returncode:
        reason, *_ = [*result.stderr.splitlines(), '']  # and its usage
        raise LinkError(f'no link: {command}: {reason}')
