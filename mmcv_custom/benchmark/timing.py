"""Times of steps, over one link."""

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ..compression.collective import Traffic
from ..compression.topology import Topology
from ..costs import floor_s
from .hooks import PLAIN
from .links import sent_bytes
from .method import NO_OP, Method, NoOp
from .results import Cost, LinkResult, Spread, Timing

__all__ = [
    'Row',
    'find_device',
    'measure_reached',
    'measure_transport',
    'summarize',
    'time_steps',
]

_MESSAGE_BYTES = 2**24  # of an all-reduce that fills the link
_TRIES = 3  # the best one shows what the link carries
_MANY_TRIES = 20  # of a short one


@dataclass(frozen=True)
class Row:
    """One step on one rank.

    Attributes:
        step_s: What it took.
        hidden_s: Of its exchange, during the backward pass.
        first_bucket_s: Until the first bucket, of the no-op.
        kernel_bytes: What its node has sent meanwhile, if it is counted.
    """

    step_s: float
    hidden_s: float
    first_bucket_s: float
    kernel_bytes: int | None


def find_device(topology: Topology) -> str | None:
    """Return the network device whose bytes the kernel counts.

    It is gloo's, if there are several nodes and it has one.
    """
    name = os.environ.get('GLOO_SOCKET_IFNAME', '')
    if len(topology.nodes) == 1 or dist.get_backend() != 'gloo':
        return None
    return name if os.path.exists(f'/sys/class/net/{name}') and name else None


def measure_reached(topology: Topology) -> float | None:
    """Return the bytes per second that leave a node in an all-reduce.

    None on one node.
    """
    if len(topology.nodes) == 1:
        return None
    traffic, seconds = _fastest_all_reduce(_MESSAGE_BYTES, _TRIES)
    return traffic.sent(topology, dist.get_rank()).node / seconds


def measure_transport(topology: Topology) -> tuple[float, float]:
    """Return the seconds of a message, and a rank's bytes per second.

    Of an all-reduce that is as small as can be, and of a large one. There
    have to be several ranks.
    """
    rank = dist.get_rank()
    traffic, seconds = _fastest_all_reduce(4, _MANY_TRIES)
    latency_s = seconds / traffic.messages(topology, rank)
    traffic, seconds = _fastest_all_reduce(_MESSAGE_BYTES, _TRIES)
    return latency_s, traffic.sent(topology, rank).rank / seconds


def _fastest_all_reduce(nbytes: int, tries: int) -> tuple[Traffic, float]:
    device = 'cuda' if dist.get_backend() == 'nccl' else 'cpu'
    message = torch.zeros(nbytes // 4, device=device)
    dist.all_reduce(message)  # uses up what the link lets through at once
    seconds = min(_slowest_all_reduce(message) for _ in range(tries))
    return Traffic('all_reduce', message.nbytes), seconds


def _slowest_all_reduce(message: torch.Tensor) -> float:
    """Return the seconds of the rank that left the barrier first."""
    dist.barrier()
    start = time.perf_counter()
    dist.all_reduce(message)
    message[0].item()  # waits on an accelerator
    seconds: list = [None] * dist.get_world_size()
    dist.all_gather_object(seconds, time.perf_counter() - start)
    return max(seconds)


def time_steps(
    methods: dict[str, Method],
    rounds: int,
    device: str | None,
    tick: Callable[[], None],
) -> list[dict[str, list[Row]]]:
    """Time one step of each method in turn, for so many rounds.

    All ranks call it alike; a first round more is left out.

    Returns:
        The rows of each rank, by label.
    """
    rows: dict[str, list[Row]] = {label: [] for label in methods}
    for number in range(rounds + 1):
        for label, method in methods.items():
            row = _time_step(method, device)
            if number:
                rows[label].append(row)
            tick()
    gathered: list = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, rows)
    return gathered


def _time_step(method: Method, device: str | None) -> Row:
    before = sent_bytes(device) if device else 0
    dist.barrier()
    step_s, hidden_s = method.step()
    dist.barrier()  # until all have sent all
    sent = sent_bytes(device) - before if device else None
    method.ddp.zero_grad()
    is_no_op = isinstance(method, NoOp)
    first = method.notes.first_bucket_s if is_no_op else 0.0
    return Row(step_s, hidden_s, first, sent)


def summarize(
    link: str,
    rate: float | None,
    reached: float | None,
    rows: list[dict[str, list[Row]]],
    costs: list[Cost],
    compute_is_aside: bool,
) -> LinkResult:
    """Make the figures of a link from the rows of all ranks.

    Args:
        link: Its name.
        rate: Bytes per second of a node's link; None if it is not known.
        reached: What a large all-reduce reaches.
        rows: From :func:`time_steps`.
        costs: Of each hook.
        compute_is_aside: Whether hooks have a core, or an accelerator's
            stream, beside what computes the step.
    """
    no_op, _, first_bucket_s, _ = _over_ranks(rows, NO_OP.label)
    plain = _over_ranks(rows, PLAIN)[0].median
    timings = []
    for cost in costs:
        step, hidden_s, _, kernel = _over_ranks(rows, cost.hook)
        sent = kernel if cost.node_bytes is None else cost.node_bytes
        compute_s = 0.0 if compute_is_aside else cost.compute_s
        known = (no_op.median, first_bucket_s, compute_s, sent)
        floor = floor_s(*known, rate or reached)
        timings.append(
            Timing(
                hook=cost.hook,
                step_s=step,
                exposed_s=max(0.0, step.median - no_op.median),
                hidden_s=min(hidden_s, no_op.median),
                kernel_bytes=kernel,
                speed=plain / step.median,
                floor_s=floor,
                ratio=step.median / floor,
                net_ratio=reached and step.median / floor_s(*known, reached),
            )
        )
    return LinkResult(link, rate, reached, no_op, first_bucket_s, timings)


def _over_ranks(
    rows: list[dict[str, list[Row]]], label: str
) -> tuple[Spread, float, float, float | None]:
    """Return step, hidden time, first bucket and kernel's bytes.

    A step lasts until the slowest rank has its gradients; hidden is what was
    so on that rank.
    """
    rounds = list(zip(*(of_rank[label] for of_rank in rows), strict=True))
    slowest = [max(ranks, key=lambda row: row.step_s) for ranks in rounds]
    kernel = None
    if slowest[0].kernel_bytes is not None:
        # A mean, as a hook may send more in every other step.
        kernel = statistics.fmean(
            max(row.kernel_bytes for row in ranks) for ranks in rounds
        )
    return (
        Spread.of([row.step_s for row in slowest]),
        statistics.median(row.hidden_s for row in slowest),
        statistics.median(
            max(row.first_bucket_s for row in ranks) for ranks in rounds
        ),
        kernel,
    )
