"""A prediction without a run: from the shapes of a model, and a step time."""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn

from .. import costs
from .bases import SLOW_LATENCY_S, SLOW_SHARE, Bases, Basis, HookBasis
from .cluster import Cluster
from .hooks import PLAIN, Choice
from .prediction import Predictor
from .results import Outlook

__all__ = ['assumed_bases', 'bucket_bytes', 'look_ahead']

# Where nothing is measured, likely and at most: what a hook computes, in
# copies of all gradients within an accelerator's memory, and a message.
_COPIES = (3, 10)
_COPIED_BYTES_PER_S = 500e9
_LATENCY_S = 10e-6
# Between the accelerators of a machine, likely and at least: as over PCIe.
_INSIDE_BYTES_PER_S = (20e9, 10e9)
# Of DDP, by default: the first one is smaller.
_BUCKET_BYTES = (2**20, 25 * 2**20)
_NOTES = (
    'Nothing was measured: a run without --step-ms narrows the range. The '
    'ranks are GPUs, with the step without exchange as given. step: likely; '
    'forward and backward pass take 1 : 2, the latter of what is trained; a '
    f'hook computes as long as {_COPIES[0]} copies of the gradients take at '
    f'{_COPIED_BYTES_PER_S / 1e9:.0f} GB/s; a message takes '
    f'{_LATENCY_S * 1e6:.0f} us; {_INSIDE_BYTES_PER_S[0] / 1e9:.0f} GB/s '
    f'within a machine; the link carries {costs.TCP_SHARE:.1%} of its rate '
    '(headers of TCP). range: from a step that hides all that the rate '
    'allows, and hooks that compute nothing; to a step that hides nothing, '
    f'{_COPIES[1]} copies, {SLOW_LATENCY_S * 1e6:.0f} us, '
    f'{_INSIDE_BYTES_PER_S[1] / 1e9:.0f} GB/s and {SLOW_SHARE:.0%} of the '
    'rate.'
)


def look_ahead(
    name: str,
    model: nn.Module,
    choices: Sequence[Choice],
    clusters: Sequence[Cluster],
    step_s: float,
) -> Outlook:
    """Predict hooks on clusters of GPUs without running anything.

    Args:
        name: Of the model.
        model: Of any device, 'meta' too.
        choices: The hooks, plain DDP among them.
        clusters: The clusters.
        step_s: Of a step without exchange, on one of their GPUs.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    predictor = Predictor(choices, trained, 'cuda')
    hooks = [*predictor.sent(clusters[0].topology)]
    bases = assumed_bases([*model.parameters()], hooks, step_s)
    prediction = predictor.predict(bases, clusters, _NOTES)
    setting: dict[str, Any] = {
        'torch': torch.__version__,
        'workload': name,
        'parameters': sum(p.numel() for p in trained),
        'gradient_bytes': prediction.gradient_bytes,
        'step_s': step_s,
    }
    return Outlook(setting, prediction)


def assumed_bases(
    parameters: Sequence[torch.Tensor], hooks: Sequence[str], step_s: float
) -> Bases:
    """Return what can be said without measuring.

    Where the backward pass begins is not known: at the low end all of the
    step hides what is exchanged, at the high end nothing does. Between, a
    parameter takes as long as any other: one part for the forward pass, and
    two for the backward pass if it is trained.

    Args:
        parameters: Of the model, frozen ones too.
        hooks: Their labels.
        step_s: Of a step without exchange.
    """
    trained = [p for p in parameters if p.requires_grad]
    forward = sum(p.numel() for p in parameters)
    backward = 2 * sum(p.numel() for p in trained)
    buckets = bucket_bytes(trained)
    # A copy reads and writes.
    copy_s = 2 * sum(buckets) / _COPIED_BYTES_PER_S

    def basis(
        first_share: float,
        copies: int,
        bytes_per_s: float,
        latency_s: float,
        rate_share: float,
    ) -> Basis:
        return Basis(
            no_op_s=step_s,
            first_bucket_s=first_share * step_s,
            buckets=len(buckets),
            bucket_share=max(buckets) / sum(buckets),
            bytes_per_s=bytes_per_s,
            latency_s=latency_s,
            rate_share=rate_share,
            hooks={
                hook: HookBasis((hook != PLAIN) * copies * copy_s)
                for hook in hooks
            },
        )

    fast, slow = _INSIDE_BYTES_PER_S
    some, many = _COPIES
    forward_share = forward / (forward + backward)
    return Bases(
        low=basis(0.0, 0, fast, 0.0, 1.0),
        likely=basis(forward_share, some, fast, _LATENCY_S, costs.TCP_SHARE),
        high=basis(1.0, many, slow, SLOW_LATENCY_S, SLOW_SHARE),
    )


def bucket_bytes(parameters: Sequence[torch.Tensor]) -> list[int]:
    """Return the bytes of the buckets that DDP makes, by default.

    Args:
        parameters: Those that are trained, in the model's order.
    """
    filling: dict[torch.dtype, int] = {}
    full: dict[torch.dtype, list[int]] = {}
    for parameter in reversed(parameters):
        dtype = parameter.dtype
        done = full.setdefault(dtype, [])
        nbytes = filling.pop(dtype, 0) + parameter.nbytes
        if nbytes < _BUCKET_BYTES[bool(done)]:
            filling[dtype] = nbytes
        else:
            done.append(nbytes)
    return [*chain(*full.values()), *filling.values()]
