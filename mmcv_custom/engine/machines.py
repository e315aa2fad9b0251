"""Which machine it is that gloo has lost."""

import re
import socket

from torch.distributed import Store

from .network import addresses_of

__all__ = ['exchange_names', 'lost_machine']

_ADDRESS = re.compile(r'\[?([0-9a-fA-F.:]*[.:][0-9a-fA-F.:]*?)\]?:\d+\b')
# Of the default group: by address, the machine's name and its ranks.
_machines: dict[str, tuple[str, list[int]]] = {}


def exchange_names(
    store: Store, rank: int, world_size: int, interface: str
) -> None:
    """Learn the names behind the addresses that gloo uses.

    A collective: it returns when every process has called it.

    Args:
        store: A store that the processes share; each sets one key.
        rank: The rank of this process.
        world_size: The number of processes.
        interface: Of gloo, on this machine.
    """
    mine = [socket.gethostname(), *addresses_of(interface)]
    store.set(f'machine/{rank}', ' '.join(mine))
    _machines.clear()
    for other in range(world_size):
        name, *addresses = store.get(f'machine/{other}').decode().split()
        for address in addresses:
            _machines.setdefault(address, (name, []))[1].append(other)


def lost_machine(error: BaseException) -> str | None:
    """Name the first other machine whose address an error has.

    Returns:
        A line for the log; None if there is no such address.
    """
    for address in _ADDRESS.findall(str(error)):
        name, ranks = _machines.get(address, ('', []))
        if name and name != socket.gethostname():
            where = f'{address}; ranks {", ".join(map(str, ranks))}'
            return f'the connection to {name} ({where}) is lost'
    return None
