"""A real loss scaler takes a step with Inf back, and the hook with it."""

import pytest
import torch

from tests.test_engine.test_compression_hook import AMP, record_states
from tests.test_engine.test_hook_state import HOOKS, assert_equal

from .devices import run_on, way

NAMES = ['powersgd', 'int8', 'fp16_scaled']
BAD = 5  # the iteration with Inf on one rank


def train_with_scaler(rank, device, folder):
    # On CPU, MMEngine has to be persuaded.
    record = record_states
    amp = AMP
    if device == 'cuda':
        record = record_states.__wrapped__
        amp = {**AMP, 'dtype': 'float16'}
    return {
        name: record(rank, folder / name, HOOKS[name], amp, BAD)[0]
        for name in NAMES
    }


@pytest.mark.skipif(
    not hasattr(torch.amp, 'GradScaler'), reason='torch 2.1 has no CPU scaler'
)
@pytest.mark.parametrize(
    ('device', 'world_size'), [way('cpu', 2), way('cuda', 2)]
)
def test_step_with_inf_is_taken_back(device, world_size, tmp_path):
    results = run_on(device, world_size, train_with_scaler, tmp_path)
    for name in NAMES:
        for records in (result[name] for result in results):
            before, after = records[BAD - 1], records[BAD]
            for a, b in zip(
                before['parameters'], after['parameters'], strict=True
            ):
                assert torch.equal(a, b)
            assert after['scale'] == before['scale'] / 2
            assert after['state']['skipped_steps'] == 1
            assert after['state']['step'] == before['state']['step'] == BAD
            if name != 'fp16_scaled':  # which forgets the scales on purpose
                assert_equal(
                    after['state']['tensors'], before['state']['tensors']
                )
            last = records[-1]
            assert all(p.isfinite().all() for p in last['parameters'])
            assert last['state']['step'] == len(records) - 1
        for a, b in zip(
            *(result[name][-1]['parameters'] for result in results),
            strict=True,
        ):
            assert torch.equal(a, b)
