"""A choice between hooks in the state that is saved with a checkpoint."""

from collections.abc import Mapping
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from ...compression.topology import Topology
from ...parameters import reduced_parameters
from ..hook_state import has_state
from ..spec import CommHook

__all__ = ['choice_state', 'load_choice', 'setting_of', 'what_differs']


def setting_of(
    ddp: DistributedDataParallel, topology: Topology
) -> dict[str, Any]:
    """Return what a choice was made for, of plain data."""
    parameters = [*reduced_parameters(ddp).values()]
    return {
        'nodes': [[*node] for node in topology.nodes],
        'device': parameters[0].device.type,
        'parameters': [[str(p.dtype), *p.shape] for p in parameters],
    }


def choice_state(
    number: int, hook: CommHook, setting: dict[str, Any]
) -> dict[str, Any]:
    """Return a choice, and the state of the hook that is chosen.

    Args:
        number: Of the hook, among those that there were.
        hook: Its instance may have a state.
        setting: See :func:`setting_of`.
    """
    own: dict[str, Any] = {}
    if has_state(hook):
        own = dict(hook.instance.state_dict())
    state = {
        'kept': number,
        'hook': hook.name,
        'hook_state': own,
        'setting': setting,
    }
    if 'tensors' in own:
        # Where whoever reads the counters alone leaves them out.
        state['tensors'] = own.pop('tensors')
    return state


def what_differs(
    state: dict[str, Any],
    hooks: Mapping[int, CommHook],
    setting: dict[str, Any],
) -> str:
    """Say why a choice that was made cannot be kept; empty if it can.

    Args:
        state: As :func:`choice_state` returns it.
        hooks: That there are now, by their numbers.
        setting: Of now.
    """
    if state['setting'] != setting:
        return 'model or machines are others'
    hook = hooks.get(state['kept'])
    if hook is None or hook.name != state['hook']:
        return f'{state["hook"]} cannot be used'
    return ''


def load_choice(state: dict[str, Any], hook: CommHook) -> None:
    """Give the hook that is chosen its part of the state.

    Raises:
        ValueError: If it does not take it.
    """
    if has_state(hook):
        own = dict(state['hook_state'])
        if 'tensors' in state:
            own['tensors'] = state['tensors']
        hook.instance.load_state_dict(own)
