"""Which machine it is that gloo has lost."""

import re
import socket

from torch.distributed import Store

from .network import addresses_of

__all__ = ['exchange_names', 'lost_machine']

_ADDRESS = re.compile(r'\[?([0-9a-fA-F.:]*[.:][0-9a-fA-F.:]*?)\]?:\d+\b')
# The other machines of the default group: by address, name and ranks.
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
        interface: That gloo uses on this machine, or several with commas.
    """
    own = {ip for name in interface.split(',') for ip in addresses_of(name)}
    mine = [socket.gethostname(), *own]
    store.set(f'machine/{rank}', ' '.join(mine))
    _machines.clear()
    for other in range(world_size):
        name, *addresses = store.get(f'machine/{other}').decode().split()
        for address in set(addresses) - own:
            _machines.setdefault(address, (name, []))[1].append(other)


def lost_machine(error: BaseException) -> str | None:
    """Name the first other machine whose address an error has.

    Returns:
        A line for the log; None if there is no such address.
    """
    for address in _ADDRESS.findall(str(error)):
        name, ranks = _machines.get(address, ('', []))
        if name:
            where = f'{address}; ranks {", ".join(map(str, ranks))}'
            return f'the connection to {name} ({where}) is lost'
    return None
