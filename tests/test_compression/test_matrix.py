"""The algebra of PowerSGD, of one matrix and without ranks."""

import pytest
import torch

from mmcv_custom.compression.matrix import (
    Basis,
    Matrix,
    Whole,
    orthonormal,
)
from tests.ranks import run_ranks
from tests.test_compression.helpers import (
    ROUNDING,
    U,
    assert_same_bits,
    draw,
    trace,
)

CPU = torch.device('cpu')
# Rows, columns and rank.
IN_STRIPS = [(32, 512, 2), (48, 1024, 4), (16, 1536, 8)]
WHOLE = [(24, 40, 2), (32, 512, 1), (32, 512, 9), (33, 512, 2), (64, 9, 8)]


def make(rows, columns, rank, is_right, seed=0):
    """A basis, a matrix of values and a factor, aligned as all operands."""
    generator = torch.Generator().manual_seed(seed)
    matrix = Matrix(rows, columns, rank)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    vectors = orthonormal(normal(matrix.side(is_right), rank))
    basis = Basis(matrix, vectors, is_right, None, 0)
    return basis, normal(rows * columns), normal(basis.numel)


def product(basis, factor):
    """In float64, and what its roundings in float32 are measured by."""
    matrix, vectors = basis.matrix, basis.vectors.double()
    if basis.is_right:
        left, right = factor.double().view(matrix.rows, -1), vectors
    else:
        left, right = vectors.t(), factor.double().view(-1, matrix.columns)
    return left @ right, left.abs() @ right.abs()


def test_strips_are_for_widths_that_compete_for_the_cache():
    for shape in IN_STRIPS:
        assert Matrix(*shape).strip_rows(CPU) == 16
        assert Matrix(*shape).strip_rows(torch.device('cuda')) == shape[0]
    for shape in WHOLE:
        assert Matrix(*shape).strip_rows(CPU) == shape[0]


@pytest.mark.parametrize('is_right', [True, False])
@pytest.mark.parametrize('shape', IN_STRIPS + WHOLE, ids=str)
def test_products_in_float64(shape, is_right):
    rows, columns, rank = shape
    basis, values, factor = make(*shape, is_right)
    exact, magnitudes = product(basis, factor)
    # A sum of so many terms.
    bound = (rank + 1) * U * magnitudes
    for dtype in (torch.float32, torch.float16):
        out = torch.full((rows * columns,), torch.nan, dtype=dtype)
        basis.reconstruct(factor, out)
        missed = (out.double().view_as(exact) - exact).abs()
        rounding = ROUNDING[dtype] * (exact.abs() + 2.0**-14)
        assert (missed <= bound + rounding).all()
    left = values.clone()
    basis.subtract(left, factor)
    expected = values.double().view_as(exact) - exact
    missed = (left.double().view_as(exact) - expected).abs()
    # What the terms are taken from is one of them, and may be the first.
    magnitudes += values.double().abs().view_as(exact)
    assert (missed <= (rank + 2) * U * magnitudes).all()


@pytest.mark.parametrize('is_right', [True, False])
@pytest.mark.parametrize('shape', [*IN_STRIPS, *WHOLE, (16, 8, 8)], ids=str)
def test_bits_do_not_depend_on_where_the_result_lies(shape, is_right):
    numel = shape[0] * shape[1]
    basis, _, factor = make(*shape, is_right)
    first = None
    for offset in range(17):
        out = torch.empty(numel + 16)[offset : offset + numel]
        basis.reconstruct(factor, out)
        first = out if first is None else first
        assert torch.equal(out, first), offset


@pytest.mark.parametrize('is_right', [True, False])
@pytest.mark.parametrize('shape', IN_STRIPS + WHOLE, ids=str)
def test_what_is_sent_ends_where_the_next_may_start(shape, is_right):
    basis, values, _ = make(*shape, is_right)
    sent = basis.project(values)
    assert len(sent) % 16 == 0
    assert 0 <= len(sent) - basis.numel < 16
    assert sent[basis.numel :].count_nonzero() == 0
    whole = Whole(5).project(torch.ones(5))
    assert whole.tolist() == [1] * 5 + [0] * 11


LAYOUT_SHAPES = {'odd': (3,), 'w0': (16, 9), 'w1': (32, 512), 'w2': (5, 3)}


def any_gradients(rank, step):
    return draw(rank, step, LAYOUT_SHAPES.values())


def both_layouts(rank, method, wrapper):
    """Traces with a bucket for each parameter, and with one for all."""
    knobs = {
        'matrix_approximation_rank': 8,
        'start_powerSGD_iter': 2,
        'min_compression_rate': 0,
    }
    return [
        trace(
            rank,
            method,
            knobs,
            LAYOUT_SHAPES,
            any_gradients,
            6,
            wrapper,
            options,
        )
        for options in ({}, {'bucket_cap_mb': 25})
    ]


@pytest.mark.parametrize(
    ('method', 'collectives'), [('powersgd', 1), ('powersgd_whole', 2)]
)
@pytest.mark.parametrize('wrapper', [None, 'fp16'])
def test_bits_do_not_depend_on_the_buckets(wrapper, method, collectives):
    for small, large in run_ranks(both_layouts, method, wrapper):
        assert len(small[-1].calls) > len(large[-1].calls) == collectives
        for ours, theirs in zip(small, large, strict=True):
            for a, b in zip(ours.average, theirs.average, strict=True):
                assert torch.equal(a, b)
            assert_same_bits(matrices_of(ours), matrices_of(theirs))
        assert set(matrices_of(large[-1])['basis']) == {'w0', 'w1', 'w2'}


def matrices_of(step):
    """The state; a vector's error is zero, where there is one."""
    tensors = step.after['tensors']
    assert not tensors.get('error', {}).get('odd', torch.zeros(3)).any()
    return {
        kind: {name: t for name, t in named.items() if name != 'odd'}
        for kind, named in tensors.items()
    }
