"""Start gloo on the network interface that reaches the other machines."""

import os
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch.distributed as dist

from .machines import exchange_names
from .network import find_interface, list_interfaces

__all__ = ['init_gloo']

# How long gloo may try to connect, a few times over. It takes moments, as all
# processes have met in the store by then. With the timeout of the collectives
# instead, all would wait that long for a machine that none can reach.
_CONNECT_TIMEOUT = timedelta(seconds=15)
_INTERFACE = 'GLOO_SOCKET_IFNAME'


def init_gloo(
    backend: str,
    timeout: timedelta,
    init_method: str | None = None,
    rank: int = -1,
    world_size: int = -1,
    **options: Any,
) -> None:
    """Start the default process group when all processes are there.

    gloo takes the network interface that the host's name stands for, which
    is the loopback on many machines. Here it takes the one that reaches the
    other machines, unless ``GLOO_SOCKET_IFNAME`` names one.

    Args:
        backend: gloo, or several with gloo among them.
        timeout: How long a collective may take.
        init_method: As in ``init_process_group``.
        rank: As in ``init_process_group``.
        world_size: As in ``init_process_group``.
        **options: More options of ``init_process_group``.

    Raises:
        RuntimeError: If gloo cannot connect the processes.
    """
    where = init_method or 'env://'
    rendezvous = dist.rendezvous(where, rank, world_size, timeout=timeout)
    store, rank, world_size = next(rendezvous)
    store.set_timeout(timeout)
    master = urlsplit(where).hostname or os.environ.get('MASTER_ADDR')
    if master:
        interface = find_interface(store, rank, world_size, master)
        if interface and not os.environ.get(_INTERFACE):
            os.environ[_INTERFACE] = interface
    # torch 2.1 cannot change the timeout of a group, so the short one for
    # connecting would remain.
    set_timeout = getattr(dist, 'set_timeout', None)
    try:
        dist.init_process_group(
            backend,
            store=dist.PrefixStore('default_pg', store),
            rank=rank,
            world_size=world_size,
            timeout=min(timeout, _CONNECT_TIMEOUT) if set_timeout else timeout,
            **options,
        )
    except RuntimeError as error:
        raise RuntimeError(
            f'gloo cannot connect the {world_size} processes; this one, rank '
            f'{rank}, used {_INTERFACE}={os.environ.get(_INTERFACE, "")} of '
            f'{list_interfaces()}. Set {_INTERFACE} on each machine to the '
            'interface that reaches the others, and see that no firewall '
            f'stands between them. gloo says: {error}'
        ) from error
    if set_timeout:
        set_timeout(timeout)
    exchange_names(store, rank, world_size, os.environ.get(_INTERFACE, ''))
