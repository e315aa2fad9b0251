"""The hooks that a trial is about."""

from collections.abc import Sequence

import torch.distributed as dist

from ..registry import PLAIN_AVERAGE
from ..spec import CommHook, HookSpec

__all__ = ['build_hooks']


def build_hooks(
    candidates: Sequence[str | dict], process_group: dist.ProcessGroup | None
) -> list[CommHook]:
    """Build the plain average, and the candidates after it.

    Args:
        candidates: Values of ``ddp_comm_hook``.
        process_group: To average over; None is the world group.

    Raises:
        TypeError, ValueError: If they are no list, or one is wrong, the plain
            average, another choice between hooks, or named twice.
    """
    if not isinstance(candidates, (list, tuple)) or not candidates:
        raise TypeError(
            f'candidates={candidates!r} must be a list of hooks, such as '
            "['fp16_scaled', dict(type='int8')]"
        )
    plain = HookSpec.parse(PLAIN_AVERAGE)
    specs = [plain]
    for candidate in candidates:
        try:
            spec = HookSpec.parse(candidate)
        except (TypeError, ValueError) as error:
            raise type(error)(f'candidates: {error}') from error
        if spec is None or spec == plain:
            raise ValueError(
                f'candidates: {candidate!r} is the plain average, which is '
                'always tried; leave it out'
            )
        if getattr(spec.target, 'is_choice', False):
            raise ValueError(
                f'candidates: {candidate!r} chooses between hooks itself; '
                'name hooks'
            )
        if spec in specs:
            raise ValueError(f'candidates: {candidate!r} is named twice')
        specs.append(spec)
    return [spec.build(process_group) for spec in specs]
