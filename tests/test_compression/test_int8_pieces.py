"""Large buckets travel in pieces and parts, which changes no bit."""

import pytest
import torch

from mmcv_custom.compression import Int8, blocks
from mmcv_custom.compression.gradient import cut
from tests.ranks import run_ranks
from tests.test_compression.helpers import assert_same_bits, draw, trace

SHAPES = {f'p{n}': (n,) for n in (300, 5000, 1, 1537)}


def normal(rank, step):
    return draw(rank, step, SHAPES.values())


def trace_in_pieces(rank, chunk, *args):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, '_CHUNK', chunk)
        return trace(rank, *args)


@pytest.mark.parametrize('stochastic', [False, True])
@pytest.mark.parametrize('world_size', [2, 3])
def test_pieces_change_nothing(world_size, stochastic):
    knobs = {'use_error_feedback': True, 'stochastic_rounding': stochastic}
    whole, cut = (
        run_ranks(
            trace_in_pieces,
            chunk,
            'int8',
            knobs,
            SHAPES,
            normal,
            3,
            world_size=world_size,
        )
        for chunk in (1000, 3)
    )
    for one, other in zip(whole, cut, strict=True):
        assert len(other[0].calls) > len(one[0].calls)
        for a, b in zip(one, other, strict=True):
            for x, y in zip(a.average, b.average, strict=True):
                assert (x == y).all()
            assert_same_bits(a.after['tensors'], b.after['tensors'])


def trace_in_parts(rank, numel, *args):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Int8, '_part_numel', numel)
        return trace(rank, *args)


def test_parts_change_nothing():
    """Of a bucket that is cut between its parameters."""
    knobs = {'use_error_feedback': True, 'stochastic_rounding': True}
    whole, cut_up = (
        run_ranks(
            trace_in_parts,
            numel,
            'int8',
            knobs,
            SHAPES,
            normal,
            3,
            None,
            {'bucket_cap_mb': 25},
        )
        for numel in (None, 1000)
    )
    for one, other in zip(whole, cut_up, strict=True):
        assert [len(step.calls) for step in one] == [2, 2, 2]
        # Of the 1537, of the 1 and 5000, and of the 300 elements, once the
        # bucket is laid anew.
        assert [len(step.calls) for step in other[1:]] == [6, 6]
        for a, b in zip(one, other, strict=True):
            for x, y in zip(a.average, b.average, strict=True):
                assert torch.equal(x, y)
            assert_same_bits(a.after['tensors'], b.after['tensors'])


def lengths_of_parts(parameters, numel):
    buffer = torch.arange(sum(p.numel() for p in parameters))
    parts = cut(buffer, parameters, numel)
    assert torch.equal(torch.cat([part for part, _ in parts]), buffer)
    assert [p for _, own in parts for p in own] == parameters
    for part, own in parts:
        assert len(part) == sum(p.numel() for p in own)
    return [[p.numel() for p in own] for _, own in parts]


def test_parts_are_cut_between_parameters():
    parameters = [torch.zeros(n) for n in (0, 3, 2, 9, 1, 4, 0)]
    assert lengths_of_parts(parameters, 5) == [[0, 3, 2], [9], [1, 4, 0]]
    assert lengths_of_parts(parameters, 99) == [[0, 3, 2, 9, 1, 4, 0]]
    assert lengths_of_parts(parameters[3:4], 5) == [[9]]


def test_what_is_sent_as_it_is_stays_whole():
    parameters = [torch.zeros(n, dtype=torch.bfloat16) for n in (6, 7)]
    assert lengths_of_parts(parameters, 5) == [[6, 7]]
