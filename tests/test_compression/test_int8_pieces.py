"""Large buckets travel in pieces, which changes no bit of the result."""

import pytest

from mmcv_custom.compression import blocks
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
