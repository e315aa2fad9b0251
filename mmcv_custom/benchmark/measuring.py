"""All measurements of a run, on each of its ranks."""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import Progress

from ..compression.topology import Topology, find_topology
from .bases import MEASURED, measured_bases
from .cluster import Cluster
from .computing import measure_compute, measure_copy, measure_guard
from .exchange import exact_gradients, measure_exchange
from .hooks import PLAIN, WARMUP_STEPS, Choice
from .links import Rate, limit
from .method import NO_OP, Method, NoOp
from .prediction import Predictor, check_place
from .results import Cost, LinkResult, Report
from .timing import (
    find_device,
    measure_reached,
    measure_transport,
    summarize,
    time_steps,
)
from .workload import Workload

__all__ = ['measure']


def measure(
    workload: Workload,
    choices: list[Choice],
    rates: list[Rate],
    rounds: int,
    error_steps: int,
    console: Console,
    clusters: Sequence[Cluster] = (),
) -> Report:
    """Measure hooks; all ranks of the default group call it alike.

    Args:
        workload: What is trained.
        choices: The hooks, plain DDP among them.
        rates: To limit this node's link to, one after the other; without
            any, the network stays as it is.
        rounds: Of one step of each hook, per link.
        error_steps: How many steps errors are measured in.
        console: Where the first rank shows a progress bar, on a terminal.
        clusters: To predict, from steps before the first limit.

    Returns:
        The report; `copy_s` and `guard_s` are of this rank, all else is of
        all ranks and the same on each.

    Raises:
        ValueError: If clusters cannot be predicted from what connects the
            ranks.
    """
    device = next(workload.model.parameters()).device
    topology = find_topology(dist.group.WORLD, device)
    numbers = rounds, error_steps
    if not clusters:
        limits = rates or [None]
        return _measure(workload, choices, limits, *numbers, topology, console)
    check_place(topology, is_emulated=bool(rates))
    transport = measure_transport(topology)
    limits = [None, *rates]
    report = _measure(workload, choices, limits, *numbers, topology, console)
    predictor = Predictor(choices, workload.trained, device.type)
    return _predict(predictor, report, topology, transport, rates, clusters)


def _measure(
    workload: Workload,
    choices: list[Choice],
    limits: Sequence[Rate | None],
    rounds: int,
    error_steps: int,
    topology: Topology,
    console: Console,
) -> Report:
    """Measure hooks without a limit (None), or with one, in this order."""
    links_steps = len(limits) * (rounds + 1) * (len(choices) + 1)
    ticks = len(choices) * (1 + error_steps) + links_steps
    with _progress_bar(ticks, console) as tick:
        computes = _measure_computes(workload, choices, rounds, tick)
        methods = _make_methods(workload, choices)
        no_op = methods[NO_OP.label]
        guard_s = measure_guard(no_op, rounds)
        costs = _measure_costs(
            methods, choices, computes, error_steps, topology, tick
        )
        is_emulated = any(limits)
        links = [
            _measure_link(
                methods, rate, is_emulated, rounds, topology, costs, tick
            )
            for rate in limits
        ]
    for method in methods.values():
        method.close()
    return Report(
        setting=_setting(workload, topology, rounds, error_steps),
        copy_s=measure_copy(workload, rounds),
        guard_s=guard_s,
        buckets=len(no_op.notes.buckets),
        bucket_share=no_op.notes.largest_share,
        costs=costs,
        links=links,
    )


def _predict(
    predictor: Predictor,
    report: Report,
    topology: Topology,
    transport: tuple[float, float],
    rates: Sequence[Rate],
    clusters: Sequence[Cluster],
) -> Report:
    """Add a prediction."""
    bases = measured_bases(
        report,
        predictor.sent(topology),
        *transport,
        _has_spare_cores(bool(rates), topology),
    )
    checks = [
        predictor.check(link, rate, topology, bases)
        for link, rate in zip(report.links[1:], rates, strict=True)
    ]
    prediction = predictor.predict(bases, clusters, MEASURED, checks)
    return replace(report, prediction=prediction)


def _make_methods(
    workload: Workload, choices: list[Choice]
) -> dict[str, Method]:
    """Of all hooks and of none, warmed up."""
    methods: dict[str, Method] = {NO_OP.label: NoOp(workload, NO_OP)}
    for choice in choices:
        methods[choice.label] = Method(workload, choice)
    for method in methods.values():
        for _ in range(WARMUP_STEPS):
            method.step()
    return methods


def _measure_costs(
    methods: dict[str, Method],
    choices: list[Choice],
    computes: list[float],
    error_steps: int,
    topology: Topology,
    tick: Callable[[], None],
) -> list[Cost]:
    exact = exact_gradients(methods[PLAIN])
    costs = []
    for choice, compute_s in zip(choices, computes, strict=True):
        method = methods[choice.label]
        figures = {
            **measure_exchange(method, exact, error_steps, topology, tick),
            'memory_bytes': method.memory_bytes(),
            'compute_s': compute_s,
        }
        method.ddp.zero_grad()
        costs.append(Cost(choice.label, choice.config, **_largest(figures)))
    return costs


def _measure_computes(
    workload: Workload,
    choices: list[Choice],
    rounds: int,
    tick: Callable[[], None],
) -> list[float]:
    """What each hook computes on this rank, one hook after the other."""
    # It lives as long as the default group.
    alone, _ = dist.new_subgroups(group_size=1)
    computes = []
    for choice in choices:
        computes.append(measure_compute(workload, choice, alone, rounds))
        tick()
    return computes


def _measure_link(
    methods: dict[str, Method],
    rate: Rate | None,
    is_emulated: bool,
    rounds: int,
    topology: Topology,
    costs: list[Cost],
    tick: Callable[[], None],
) -> LinkResult:
    name = 'within one node' if len(topology.nodes) == 1 else 'the network'
    if rate is not None:
        name = f'{rate.name} per node'
        dist.barrier()
        limit(rate)
    elif is_emulated:
        name = 'no limit'
    dist.barrier()
    reached = measure_reached(topology)
    rows = time_steps(methods, rounds, find_device(topology), tick)
    is_aside = _has_spare_cores(is_emulated, topology)
    return summarize(
        name, rate and rate.bytes_per_s, reached, rows, costs, is_aside
    )


def _largest(figures: dict[str, Any]) -> dict[str, Any]:
    """Of each figure the largest of all ranks; None where nobody has one."""
    gathered: list = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, figures)
    return {
        key: max(
            (of[key] for of in gathered if of[key] is not None), default=None
        )
        for key in figures
    }


def _setting(
    workload: Workload, topology: Topology, rounds: int, error_steps: int
) -> dict[str, Any]:
    return {
        'torch': torch.__version__,
        'backend': dist.get_backend(),
        'ranks': dist.get_world_size(),
        'nodes': len(topology.nodes),
        'cores': _cores(),
        'workload': workload.name,
        'parameters': workload.num_parameters,
        'gradient_bytes': workload.gradient_bytes,
        'rounds': rounds,
        'error_steps': error_steps,
    }


def _has_spare_cores(is_emulated: bool, topology: Topology) -> bool:
    """Whether hooks have a core beside the step's, or an accelerator."""
    if dist.get_backend() == 'nccl':
        return True
    # All emulated nodes are this machine.
    largest = max(map(len, topology.nodes))
    return _cores() >= 2 * (topology.size if is_emulated else largest)


def _cores() -> int:
    return len(os.sched_getaffinity(0))


@contextlib.contextmanager
def _progress_bar(
    total: int, console: Console
) -> Iterator[Callable[[], None]]:
    hidden = dist.get_rank() != 0 or not console.is_terminal
    with Progress(console=console, transient=True, disable=hidden) as bar:
        task = bar.add_task('measuring', total=total)
        yield lambda: bar.advance(task)
