"""What a sampled step tells, and what a profile shows of a step."""

import pytest
import torch
from torch.profiler import profile

from mmcv_custom.compression import BF16, FP16, AllReduce, Int8, PowerSGD
from mmcv_custom.compression.sampled_cast import _count_lost
from mmcv_custom.contract import adapt_hook
from tests.ranks import run_ranks
from tests.test_compression.helpers import Leaves, average, draw, start
from tests.toy import make_ddp

SHAPES = {'a': (6, 40), 'b': (7,)}
MATRICES = [(6, 40), (6, 40)]  # a bucket each
# What becomes 0 or Inf in float16, and what does not.
LOST = [1e-9, -2.9e-8, 65520.0, -1e20]
KEPT = [0.0, 3.1e-8, 1.0, -65504.0, float('inf'), float('nan')]


def sample_casts(rank):
    hook = FP16()
    wide, narrow = torch.tensor(LOST + KEPT), torch.tensor(KEPT[1:3])
    ddp = start(hook, Leaves({'wide': wide, 'narrow': narrow.half()}))
    shares = []
    for numbers in (wide, torch.ones_like(wide), wide):
        hook.begin_sample()
        average(ddp, [numbers, narrow.half()])
        shares.append(hook.end_sample())
    average(ddp, [wide, narrow.half()])
    return shares, hook.end_sample(), hook.sample_names


def test_share_that_a_cast_loses():
    share = len(LOST) / (len(LOST + KEPT) + 2)
    for shares, without, names in run_ranks(sample_casts):
        shares = [s['lost_share'] for s in shares]
        assert shares == pytest.approx([share, 0, share])
        assert without == {}
        assert names == ('lost_share',)
    assert not hasattr(AllReduce(), 'sample_names')
    assert not hasattr(BF16(), 'sample_names')


def sample_sums(rank, places):
    hook = FP16(node_aware=True)
    wide, narrow = torch.tensor(SUMMED[rank % 2]), torch.tensor(KEPT[1:3])
    ddp = start(
        hook,
        Leaves({'wide': wide, 'narrow': narrow.half()}),
        places=places,
        bucket_cap_mb=25,
    )
    assert hook.is_node_aware
    hook.begin_sample()
    average(ddp, [wide, narrow.half()])
    sample = hook.end_sample()
    average(ddp, [wide, narrow.half()])
    return sample, hook.end_sample(), hook.sample_names


# Of two ranks of a node, four times what they add to its sum. Of the first
# rank's half the first and the third are lost, of the other's nothing; and of
# each alone, without a sum, other ones would be.
SUMMED = [
    [1e-9, 4e5, 2e5, 2e5, 1e-7, 1.0, 0.0, -1.0],
    [1e-9, -4e5, 2e5, 1.0, 1e-7, 1.0, 0.0, -1.0],
]


def test_share_that_a_cast_of_sums_loses():
    results = run_ranks(sample_sums, [0, 0, 1, 1], world_size=4)
    for rank, (sample, without, names) in enumerate(results):
        # Those of 16 bits are a bucket of their own, of which each has one.
        expected = 0 if rank % 2 else 2 / (4 + 1)
        assert sample['lost_share'] == expected
        assert without == {}
        assert names == ('lost_share',)


def test_share_is_estimated_from_a_part_of_a_large_bucket():
    values = torch.ones(2**20 + 5)
    values[: 2**19] = 1e-9
    lost, numel = _count_lost([values], torch.float16).tolist()
    assert numel == 2**20 + 5
    assert lost == pytest.approx(2**19, abs=2 * 5)  # a step at either end
    # A bucket without elements leaves those of the others as they are.
    assert _count_lost([values[:0]], torch.float16).tolist() == [0, 0]


def sample_feedback(rank, make):
    compressor = make()
    ddp = start(compressor, Leaves(SHAPES))
    seen = []
    for step in range(4):
        gradients = draw(rank, step, SHAPES.values())
        compressor.begin_sample()
        average(ddp, gradients)
        sample = compressor.end_sample()
        errors = compressor.state_dict()['tensors'].get('error', {})
        errors = {name: error.clone() for name, error in errors.items()}
        seen.append((sample, gradients, errors))
    return seen, compressor.sample_names


def int8():
    return Int8(use_error_feedback=True)


def powersgd():
    return PowerSGD(start_powerSGD_iter=2, min_compression_rate=0.5)


def norm(tensors):
    return sum(t.double().square().sum().item() for t in tensors) ** 0.5


@pytest.mark.parametrize('make', [int8, powersgd])
def test_norm_of_the_error_memory_over_the_gradient(make):
    for seen, names in run_ranks(sample_feedback, make):
        assert names == ('error_ratio',)
        for step, (sample, gradients, errors) in enumerate(seen):
            if make is powersgd and step < 2:
                assert sample == {}
                continue
            # powersgd feeds back to matrices alone.
            fed_back = gradients[: len(errors)]
            expected = norm(errors.values()) / norm(fed_back)
            assert expected > 0
            # Sums of squares in float32.
            assert sample['error_ratio'] == pytest.approx(expected, rel=1e-5)


def test_without_feedback_nothing_is_sampled():
    assert Int8().sample_names == ()


def all_threads():
    """What torch needs to be told; nothing where it cannot be."""
    try:
        config = torch._C._profiler._ExperimentalConfig(
            profile_all_threads=True
        )
    except TypeError:
        return None
    return {'experimental_config': config}


def names_of(options, ddp):
    with profile(
        activities=[torch.profiler.ProfilerActivity.CPU], **options
    ) as profiled:
        average(ddp, draw(0, 0, MATRICES))
    return {event.name for event in profiled.events()}


def profile_step(rank):
    ddp = make_ddp(Leaves(dict(zip('ab', MATRICES, strict=True))))
    hook = adapt_hook(Int8().bind(ddp), 'int8[knob=1]')
    ddp.register_comm_hook(None, hook)
    for _ in range(2):  # after the first the buckets are laid out anew
        average(ddp, draw(0, 0, MATRICES))
    options = all_threads()
    return (
        names_of({}, ddp),
        names_of(options, ddp) if options else None,
        hook.busy_s,
    )


def test_a_profile_shows_hook_bucket_and_stage():
    for names, everywhere, busy_s in run_ranks(profile_step, fresh=True):
        for bucket in (0, 1):
            assert f'int8[knob=1] bucket {bucket}' in names
            assert f'Int8 bucket {bucket} stage 0' in names
            if everywhere is not None:
                for stage in (0, 1, 2):
                    assert f'Int8 bucket {bucket} stage {stage}' in everywhere
        assert busy_s > 0
