"""All measurements of a run, on each of its ranks."""

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import Progress

from ..compression.topology import Topology, find_topology
from .computing import measure_compute, measure_copy, measure_guard
from .exchange import exact_gradients, measure_exchange
from .hooks import PLAIN, WARMUP_STEPS, Choice
from .links import Rate, limit
from .method import NO_OP, Method, NoOp
from .results import Cost, LinkResult, Report
from .timing import find_device, measure_reached, summarize, time_steps
from .workload import Workload

__all__ = ['measure']


def measure(
    workload: Workload,
    choices: list[Choice],
    rates: list[Rate],
    rounds: int,
    error_steps: int,
    console: Console,
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

    Returns:
        The report; `copy_s` and `guard_s` are of this rank, all else is of
        all ranks and the same on each.
    """
    device = next(workload.model.parameters()).device
    topology = find_topology(dist.group.WORLD, device)
    links_steps = max(1, len(rates)) * (rounds + 1) * (len(choices) + 1)
    ticks = len(choices) * (1 + error_steps) + links_steps
    with _progress_bar(ticks, console) as tick:
        computes = _measure_computes(workload, choices, rounds, tick)
        methods = _make_methods(workload, choices)
        no_op = methods[NO_OP.label]
        guard_s = measure_guard(no_op, rounds)
        costs = _measure_costs(
            methods, choices, computes, error_steps, topology, tick
        )
        links = [
            _measure_link(methods, rate, rounds, topology, costs, tick)
            for rate in rates or [None]
        ]
    for method in methods.values():
        method.close()
    return Report(
        setting=_setting(workload, topology, rounds, error_steps),
        copy_s=measure_copy(workload, rounds),
        guard_s=guard_s,
        buckets=len(no_op.notes.buckets),
        costs=costs,
        links=links,
    )


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
    dist.barrier()
    reached = measure_reached(topology)
    rows = time_steps(methods, rounds, find_device(topology), tick)
    is_aside = dist.get_backend() == 'nccl' or _has_spare_cores(rate, topology)
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


def _has_spare_cores(rate: Rate | None, topology: Topology) -> bool:
    """Whether each rank has a second core, for what its hook computes."""
    # All emulated nodes are this machine.
    ranks = dist.get_world_size() if rate else max(map(len, topology.nodes))
    return _cores() >= 2 * ranks


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
