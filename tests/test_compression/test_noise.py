"""Random roundings of the ranks are independent of each other."""

import pytest
import torch

from mmcv_custom.compression import Int8
from tests.ranks import run_ranks
from tests.test_compression.helpers import Leaves, average, start

BLOCK, BLOCKS = 256, 100
PLACES = [0, 0, 1, 1]
LARGE = 127.0  # of which a step of a rank's rounding is a 127th, so 1


def gradients(rank):
    """Equal on all ranks, but for the first of each block.

    That one makes the rounding of the ranks, and of the nodes' sums, coarse.
    It cancels in the mean, whose own rounding is 30 times as fine.
    """
    generator = torch.Generator().manual_seed(0)
    values = 6 * torch.rand(BLOCKS, BLOCK, generator=generator) - 3
    values[:, 0] = LARGE if PLACES[rank] == 0 else -LARGE
    return values


def errors_of(rank):
    """Of one average, flat and by nodes."""
    found = []
    for node_aware in (False, True):
        hook = Int8(stochastic_rounding=True, node_aware=node_aware)
        ddp = start(hook, Leaves({'w': (BLOCKS, BLOCK)}), places=PLACES)
        assert hook.is_node_aware == node_aware
        local = gradients(rank)
        (mean,) = average(ddp, [local])
        found.append((mean.double() - local)[:, 1:])
        hook.close()
    return found


def test_errors_average_out_over_the_ranks():
    exact = gradients(0)[:, 1:].double()
    fractions = exact - exact.floor()
    # The variance of a rounding, in steps: on average 1/6.
    variance = (fractions * (1 - fractions)).mean().item()
    for by_kind in run_ranks(errors_of, world_size=4):
        for error, addends in zip(by_kind, (4, 2), strict=True):
            expected = variance / addends
            # No error is above a step, so that of its square's mean is at
            # most the root of `expected` over their number: six times that.
            bound = 6 * (expected / error.numel()) ** 0.5
            # The mean is up to 4, and rounded to 127ths of it.
            bound += (4 / 127) ** 2 / 4
            found = error.square().mean().item()
            assert found == pytest.approx(expected, abs=bound)
            # With the same noise on all ranks nothing would average out.
            assert bound < (variance - expected) / 4
