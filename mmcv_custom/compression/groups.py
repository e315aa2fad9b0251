"""Process groups of a pipeline's own."""

from typing import Any

import torch
import torch.distributed as dist

from .topology import Scope, Topology

__all__ = ['ENDS_GROUPS', 'end_groups', 'make_group']

# gloo of torch 2.1 ends a group with the GIL held, for which the group's own
# threads may wait, as they let go of tensors. There the groups live on.
ENDS_GROUPS = torch.__version__ >= '2.14'  # what lies between is not tested
_living_on: list[dist.ProcessGroup] = []


def make_group(
    group: dist.ProcessGroup,
    device: torch.device,
    topology: Topology,
    scope: Scope,
) -> dist.ProcessGroup:
    """Make a new group of the ranks that a scope has for this one.

    All ranks of the world have to call this alike.

    Args:
        group: Of all ranks of the world, in any order, which the new one has.
        device: Of the tensors; tells which of its backends is meant.
        topology: Of its ranks.
        scope: Between whom the new group is.
    """
    # Which the stubs of older torch do not have.
    backend = group._get_backend(device)  # type: ignore[attr-defined]
    # TORCH_DISTRIBUTED_DEBUG=DETAIL wraps it into one without options.
    backend = getattr(backend, 'wrapped_pg', backend)
    ranks = dist.get_process_group_ranks(group)
    # Older torch knows no other order than the ascending one.
    in_order: dict[str, Any] = {}
    if ranks != sorted(ranks):
        in_order = {'sort_ranks': False}
    parts = {topology.members(scope, rank) for rank in range(group.size())}
    made = {
        part: dist.new_group(
            [ranks[rank] for rank in part],
            timeout=backend.options._timeout,
            backend=backend.name(),
            **in_order,
        )
        for part in sorted(parts)
    }
    mine = made[topology.members(scope, group.rank())]
    return mine  # type: ignore[return-value] # a member


def end_groups(groups: list[dist.ProcessGroup]) -> None:
    """End groups, the latest first, and empty the list."""
    if not ENDS_GROUPS:
        _living_on.extend(groups)
        groups.clear()
    while groups:
        try:
            dist.destroy_process_group(groups.pop())
        except ValueError:  # gone already, with the default group
            pass
