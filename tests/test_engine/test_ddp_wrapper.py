"""The DDP wrapper alone, and through MMEngine's own runner."""

import pytest
import torch
import torch.distributed as dist
from mmengine.runner import Runner

from mmcv_custom.ddp_hooks import allreduce_hook, fp16_compress_hook
from mmcv_custom.engine import CommHookDistributedDataParallel
from tests import user_hooks
from tests.ranks import gloo_reduces, run_ranks
from tests.test_engine.toy_runner import make_cfg
from tests.toy import (
    loss_of,
    make_batch,
    make_model,
    reference_gradients,
    train_step,
)
from tests.wire import record_all_reduce


def wrap(**options):
    return CommHookDistributedDataParallel(make_model(), **options)


def train_with_user_hook(rank):
    ddp = wrap(device_ids=[rank])
    ddp.register_comm_hook(None, user_hooks.returns_wait_only)
    return train_step(ddp, rank), ddp.device_ids


def test_takes_a_hook_in_any_form_and_drops_device_ids_on_cpu():
    for gradients, device_ids in run_ranks(train_with_user_hook):
        assert device_ids is None
        for grad, mean in zip(gradients, reference_gradients(2), strict=True):
            assert (grad - mean).abs().max() <= 1e-6 * mean.abs().max()


def build(rank, cfg):
    ddp = wrap(ddp_comm_hook=cfg)
    with record_all_reduce() as log:
        train_step(ddp, rank)
    return (
        ddp._get_ddp_logging_data().get('comm_hook'),
        {c.dtype for c in log},
        ddp.broadcast_buffers,
    )


@pytest.mark.parametrize(
    ('cfg', 'name', 'dtypes'),
    [
        (None, None, set()),
        ('fp16', 'fp16', {torch.float16}),
        (
            {'type': 'allreduce', 'wrapper': 'fp16'},
            'fp16_wrapper(allreduce)',
            {torch.float16},
        ),
        ('allreduce', 'allreduce', {torch.float32}),
        (
            {'type': 'tests.user_hooks.returns_future', 'wrapper': 'fp16'},
            'fp16_wrapper(tests.user_hooks.returns_future)',
            {torch.float16},
        ),
    ],
)
def test_registers_its_own_key(cfg, name, dtypes):
    assert run_ranks(build, cfg) == [(name, dtypes, False)] * 2


def register_twice(rank):
    ddp = wrap(ddp_comm_hook='fp16')
    with pytest.raises(RuntimeError, match="'allreduce_hook' cannot be"):
        ddp.register_comm_hook(None, allreduce_hook)
    # torch alone would log the hook it has just refused.
    assert ddp._get_ddp_logging_data()['comm_hook'] == 'fp16'
    with record_all_reduce() as log:
        train_step(ddp, rank)
    return {c.dtype for c in log}


def test_second_registration_is_refused_and_leaves_no_trace():
    assert run_ranks(register_twice) == [{torch.float16}] * 2


def register_late(rank, options):
    ddp = wrap(**options)
    loss_of(ddp, make_batch(rank)).backward()
    ddp.zero_grad(set_to_none=True)
    with pytest.raises(RuntimeError, match='before the first backward'):
        ddp.register_comm_hook(None, fp16_compress_hook)


@pytest.mark.parametrize(
    'options',
    [
        {},
        {'static_graph': True},
        {'find_unused_parameters': True},
        {'gradient_as_bucket_view': True},
    ],
    ids=str,
)
def test_registration_after_the_first_backward_is_refused(options):
    run_ranks(register_late, options)


def register_after_forward_only(rank):
    model = make_model()
    loss_of(model, make_batch(rank)).backward()  # not a backward of the DDP
    ddp = CommHookDistributedDataParallel(model)
    with torch.no_grad():
        ddp(make_batch(rank))
    ddp.register_comm_hook(None, fp16_compress_hook)
    return train_step(ddp, rank)


def test_registration_after_other_uses_of_the_model_is_accepted():
    run_ranks(register_after_forward_only)


def train_with_mmengines_runner(rank, work_dir):
    cfg = make_cfg(
        work_dir,
        model_wrapper_cfg={
            'type': 'CommHookDistributedDataParallel',
            'ddp_comm_hook': 'fp16',
        },
    )
    del cfg['cfg']['ddp_comm_hook']
    runner = Runner(**cfg)
    with record_all_reduce() as log:
        runner.train()
    return (
        runner.model._get_ddp_logging_data()['comm_hook'],
        sum(c.dtype == torch.float16 for c in log),
    )


def test_works_in_mmengines_own_runner(tmp_path):
    for name, reductions in run_ranks(train_with_mmengines_runner, tmp_path):
        assert name == 'fp16'
        assert reductions == 4


def refuse_bad_key(rank):
    with pytest.raises(ValueError, match="unknown ddp_comm_hook 'fp_16'"):
        wrap(ddp_comm_hook='fp_16')


def test_bad_key_is_refused():
    run_ranks(refuse_bad_key)


def refuse_bfloat16(tensor, *args, original=dist.all_reduce, **kwargs):
    if tensor.dtype == torch.bfloat16:
        raise RuntimeError('Invalid scalar type')
    return original(tensor, *args, **kwargs)


def wrap_on_a_poor_backend(rank, cfg):
    dist.all_reduce = refuse_bfloat16
    try:
        wrap(ddp_comm_hook=cfg)
    except RuntimeError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    'cfg', ['bf16', {'type': 'allreduce', 'wrapper': 'bf16'}]
)
def test_backend_without_bf16_is_named_on_every_rank(cfg):
    for message in run_ranks(wrap_on_a_poor_backend, cfg):
        assert message == (
            f"backend 'gloo' of torch {torch.__version__} cannot reduce "
            'torch.bfloat16 (Invalid scalar type); use '
            "ddp_comm_hook='fp16' or 'allreduce'"
        )


def test_backend_is_asked_for_the_wire_dtype_only():
    assert run_ranks(wrap_on_a_poor_backend, 'fp16') == [None, None]


def wrap_bfloat16(rank):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    model[0].bfloat16().requires_grad_(False)
    try:
        CommHookDistributedDataParallel(model, ddp_comm_hook='fp16')
    except RuntimeError as error:
        # The connections are in no state to be used once more.
        dist.destroy_process_group()
        return str(error)
    return None


def test_bfloat16_parameters():
    for message in run_ranks(wrap_bfloat16):
        assert (message is None) == gloo_reduces(torch.bfloat16)
        if message is not None:
            assert message.startswith(
                f"backend 'gloo' of torch {torch.__version__} cannot send "
                'one of the dtypes of the model, torch.bfloat16, '
                'torch.float32 (Invalid scalar type'
            )
