"""The DDP wrapper alone, and through MMEngine's own runner."""

import copy
import inspect
import pickle
import warnings

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from mmengine.runner import Runner
from torch.nn.parallel import DistributedDataParallel

from mmcv_custom.ddp_hooks import allreduce_hook, fp16_compress_hook
from mmcv_custom.engine import CommHookDistributedDataParallel
from mmcv_custom.engine.auto import several
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
        (
            {'type': 'auto', 'candidates': ['fp16']},
            "auto[candidates=['fp16'], max_error=0.02, keep_choice=True]",
            {torch.float32},
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
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, 'all_reduce', refuse_bfloat16)
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


def try_on_a_poor_backend(rank):
    said = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, 'all_reduce', refuse_bfloat16)
        patch.setattr(several, 'log', lambda text, level: said.append(text))
        ddp = wrap(ddp_comm_hook={'type': 'auto', 'candidates': ['bf16']})
    train_step(ddp, rank)
    return said


def test_candidate_that_the_backend_lacks_is_left_out_with_its_reason():
    assert (
        run_ranks(try_on_a_poor_backend)
        == [
            [
                "bf16 is left out: backend 'gloo' of torch "
                f'{torch.__version__} cannot reduce torch.bfloat16 (Invalid '
                'scalar type)'
            ]
        ]
        * 2
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


def buffers_option(rank, options):
    """What DDP does with the buffers, without a warning of an old name."""
    with warnings.catch_warnings():
        warnings.simplefilter('error', FutureWarning)
        return wrap(**options).broadcast_buffers


def test_buffers_are_not_sent_around_unless_asked_for():
    assert run_ranks(buffers_option, {}) == [False] * 2


@pytest.mark.filterwarnings('ignore::FutureWarning')
@pytest.mark.parametrize('value', [True, False])
def test_a_users_option_for_the_buffers_wins(value):
    parameters = inspect.signature(DistributedDataParallel).parameters
    for name in ('broadcast_buffers', 'forward_sync_buffers'):
        if name in parameters:
            assert run_ranks(users_option, {name: value}) == [value] * 2


def users_option(rank, options):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        value = wrap(**options).broadcast_buffers
    # That both are set.
    assert not any('Both' in str(warning.message) for warning in caught)
    return value


def refused_registrations(rank):
    """The error of each refusal, and what DDP's logging data tell of it."""
    refusals = []
    for hook, setup in (
        ({}, None),
        (lambda bucket: bucket, None),
        (allreduce_hook, 'fp16'),
        (allreduce_hook, 'trained'),
    ):
        ddp = wrap(ddp_comm_hook=setup if setup == 'fp16' else None)
        if setup == 'trained':
            train_step(ddp, rank)
        with pytest.raises((TypeError, RuntimeError)) as error:
            ddp.register_comm_hook({}, hook)
        data = ddp._get_ddp_logging_data()
        refusals.append(
            (
                error.type,
                str(error.value),
                data['has_error'],
                data['error'],
                data.get('comm_hook'),
            )
        )
    return refusals


def test_refused_registrations_are_in_the_logging_data():
    for refusals in run_ranks(refused_registrations):
        for error, message, has_error, logged, _ in refusals:
            assert has_error
            assert logged == f'{error}: {message}'
        assert [hook for *_, hook in refusals] == [None, None, 'fp16', None]
        assert [error for error, *_ in refusals] == [
            TypeError,
            TypeError,
            RuntimeError,
            RuntimeError,
        ]


def unfreeze_later(rank):
    model = make_model()
    model[0].requires_grad_(False)
    ddp = CommHookDistributedDataParallel(model, ddp_comm_hook='fp16')
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(index):
        loss_of(ddp, make_batch(rank, index)).backward()
        optimizer.step()

    step(0)
    model[0].requires_grad_(True)
    with pytest.raises(RuntimeError, match=r'0\.weight and 1 more: trained'):
        step(1)
    with torch.no_grad():
        ddp(make_batch(rank))  # nothing to reduce
    # A copy is built for what is trained when it is made.
    step_of_copy = copy.deepcopy(ddp)
    loss_of(step_of_copy, make_batch(rank)).backward()
    return [p.detach() for p in model.parameters()] + [
        p.grad for p in step_of_copy.parameters()
    ]


def test_parameters_that_are_unfrozen_later_stop_the_training():
    for a, b in zip(*run_ranks(unfreeze_later), strict=True):
        assert torch.equal(a, b)


def train_copied_static_graph(rank):
    ddp = wrap(static_graph=True)
    for index in range(2):
        train_step(ddp, rank, index)
    copied = pickle.loads(pickle.dumps(ddp))
    copied.register_comm_hook(None, allreduce_hook)
    return [train_step(copied, rank, index) for index in range(3)]


def test_copy_of_a_trained_static_graph_reduces():
    for gradients in run_ranks(train_copied_static_graph):
        for index, of_step in enumerate(gradients):
            for grad, mean in zip(
                of_step, reference_gradients(2, index), strict=True
            ):
                assert (grad - mean).abs().max() <= 1e-6 * mean.abs().max()


def register_with_the_python_reducer(rank):
    with (
        torch._dynamo.config.patch(optimize_ddp='python_reducer'),
        pytest.raises(RuntimeError, match="use 'ddp_optimizer'"),
    ):
        wrap(ddp_comm_hook='fp16')


@pytest.mark.skipif(
    not hasattr(torch._dynamo.utils, 'get_optimize_ddp_mode'),
    reason='older torch has one reducer',
)
def test_reducer_without_buckets_is_refused():
    # This reducer's hooks keep what was refused.
    run_ranks(register_with_the_python_reducer, fresh=True)
