"""What is read of optimizers, and trainings that cannot be."""

from types import SimpleNamespace

import pytest
import torch
from mmengine.config import ConfigDict
from mmengine.model import MMDistributedDataParallel
from mmengine.optim import OptimWrapper, OptimWrapperDict
from mmengine.registry import MODEL_WRAPPERS, OPTIM_WRAPPER_CONSTRUCTORS
from torch.distributed.optim import ZeroRedundancyOptimizer

from mmcv_custom.engine.training import (
    accumulated_iters,
    loss_scale,
    optim_wrappers,
)
from tests.ranks import run_ranks
from tests.test_engine.test_sharded import ZERO, Improving, StepBoth
from tests.test_engine.toy_runner import (
    ToyModel,
    log_of,
    make_cfg,
    make_runner,
)

SGD = {'type': 'SGD', 'lr': 0.1}
STATIC = {'static_graph': True}


def build(accumulated=1):
    parameter = torch.nn.Parameter(torch.zeros(1))
    return OptimWrapper(
        torch.optim.SGD([parameter], lr=0.1), accumulative_counts=accumulated
    )


ONE, FOUR = build(), build(4)


@pytest.mark.parametrize(
    ('optim_wrapper', 'wrappers', 'accumulated'),
    [
        (None, {}, 1),
        ({'optimizer': SGD}, {'': {'optimizer': SGD}}, 1),
        (FOUR, {'': FOUR}, 4),
        (OptimWrapperDict(a=ONE, b=FOUR), {'a': ONE, 'b': FOUR}, 4),
        ({'a': FOUR, 'b': ONE}, {'a': FOUR, 'b': ONE}, 4),
        (
            ConfigDict(
                constructor='Any',
                paramwise_cfg={'x': 1},
                a={'optimizer': SGD, 'accumulative_counts': 4},
                b={'optimizer': SGD},
            ),
            {
                'a': {'optimizer': SGD, 'accumulative_counts': 4},
                'b': {'optimizer': SGD},
            },
            4,
        ),
    ],
    ids=str,
)
def test_optimizers_are_read_in_any_form(optim_wrapper, wrappers, accumulated):
    assert optim_wrappers(optim_wrapper) == wrappers
    assert accumulated_iters(optim_wrapper) == accumulated


def test_loss_scale_is_that_of_the_wrapper_with_a_scaler():
    scaled = build()
    scaled.loss_scaler = SimpleNamespace(get_scale=lambda: 256.0)
    assert loss_scale(ONE) == 1.0
    assert loss_scale(OptimWrapperDict(a=ONE, b=scaled)) == 256.0


@OPTIM_WRAPPER_CONSTRUCTORS.register_module()
class TwoOptimizers:
    """Of the first layer and of the others, as its own keys say."""

    def __init__(self, optim_wrapper_cfg, paramwise_cfg=None):
        self.accumulated = optim_wrapper_cfg.get('for_both', 1)
        self.overlap = optim_wrapper_cfg.get('overlap', False)

    def __call__(self, model):
        layers = getattr(model, 'module', model).layers
        others = (
            ZeroRedundancyOptimizer(
                layers[1:].parameters(),
                torch.optim.AdamW,
                overlap_with_ddp=True,
            )
            if self.overlap
            else torch.optim.SGD(layers[1:].parameters(), lr=0.1)
        )
        return OptimWrapperDict(
            first=OptimWrapper(
                torch.optim.SGD(layers[0].parameters(), lr=0.1),
                accumulative_counts=self.accumulated,
            ),
            others=OptimWrapper(others),
        )


class Frozen(ToyModel):
    def __init__(self):
        super().__init__()
        self.requires_grad_(False)


@MODEL_WRAPPERS.register_module()
class OwnStaticDDP(MMDistributedDataParallel):
    """A user's own wrapper that decides itself."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, static_graph=True, **kwargs)


def accumulate(**options):
    return {'optimizer': SGD, 'accumulative_counts': 2, **options}


TWO = {'constructor': 'TwoOptimizers', 'for_both': 4}
OVERLAP = {'optimizer': {**ZERO, 'overlap_with_ddp': True}}
# Options of the runner, the hook, and the error that names what is wrong.
REFUSED = {
    'static graph': (
        {'model_wrapper_cfg': STATIC, 'optim_wrapper': accumulate()},
        None,
        'static_graph=True of the model wrapper and accumulative_counts=2',
    ),
    'static graph of an own wrapper': (
        {
            'model_wrapper_cfg': {'type': 'OwnStaticDDP'},
            'optim_wrapper': accumulate(),
        },
        'fp16',
        'static_graph=True of the model wrapper and accumulative_counts=2',
    ),
    'static graph, two optimizers': (
        {'model_wrapper_cfg': STATIC, 'optim_wrapper': TWO},
        'fp16',
        'static_graph=True of the model wrapper and accumulative_counts=4',
    ),
    'overlap': (
        {'optim_wrapper': OVERLAP},
        None,
        'optim_wrapper.optimizer.overlap_with_ddp=True needs',
    ),
    'overlap, one of two': (
        {
            'optim_wrapper': {
                'constructor': 'TwoOptimizers',
                'a': {'optimizer': SGD},
                'b': OVERLAP,
            }
        },
        'fp16',
        'optim_wrapper.b.optimizer.overlap_with_ddp=True needs',
    ),
    'overlap, one of two, built': (
        {'optim_wrapper': {'constructor': 'TwoOptimizers', 'overlap': True}},
        'fp16',
        'optim_wrapper.others.optimizer.overlap_with_ddp=True needs',
    ),
    'frozen': ({'model': Frozen}, 'fp16', 'no parameter of the Frozen requi'),
    'frozen, with groups': (
        {
            'model': Frozen,
            'optim_wrapper': {
                'optimizer': SGD,
                'constructor': 'LayerDecayOptimWrapperConstructor',
                'paramwise_cfg': {'decay_rate': 0.5},
            },
        },
        None,
        'no parameter of the Frozen requires a gradient',
    ),
}


def train_all(rank, work_dir):
    errors = {}
    for number, (name, (options, hook, _)) in enumerate(REFUSED.items()):
        options = dict(options)
        options['model'] = options.get('model', ToyModel)()
        with pytest.raises(ValueError) as error:  # noqa: PT011
            make_runner(work_dir / str(number), hook, **options).train()
        errors[name] = str(error.value)
    return errors


@pytest.fixture(scope='module')
def errors(tmp_path_factory):
    return run_ranks(train_all, tmp_path_factory.mktemp('refused'))


@pytest.mark.parametrize('name', REFUSED)
def test_impossible_training_is_refused_on_every_rank(errors, name):
    for errors_of_rank in errors:
        assert REFUSED[name][2] in errors_of_rank[name]


def test_frozen_model_in_a_single_process_is_refused(tmp_path):
    runner = make_runner(tmp_path, None, launcher='none', model=Frozen())
    with pytest.raises(ValueError, match='so there is nothing to train'):
        runner.train()


def log_two_optimizers(rank, work_dir):
    MODEL_WRAPPERS.register_module(module=StepBoth, force=True)
    runner = make_runner(
        work_dir,
        'fp16',
        optim_wrapper=TWO,
        auto_scale_lr={'base_batch_size': 4},
        model_wrapper_cfg={'type': 'StepBoth'},
    )
    runner.train()
    return log_of(runner)


def test_batch_size_of_two_optimizers_counts_the_accumulation(tmp_path):
    for log in run_ranks(log_two_optimizers, tmp_path):
        line = '2 per process x 2 processes x 4 accumulated = 16, but'
        assert log.count(line) == 1


class NoParameters(ToyModel):
    def __init__(self):
        super().__init__()
        del self.layers

    def forward(self, x, mode='loss'):
        return list(x)


class FrozenSyncBN(Frozen):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.SyncBatchNorm(3).requires_grad_(False)


def run_frozen(rank, work_dir):
    """Validation and test of models without a trained parameter."""
    results = []
    for number, (model, wrapper) in enumerate(
        (
            (Frozen(), None),
            (FrozenSyncBN(), {'type': 'CommHookDistributedDataParallel'}),
            (NoParameters(), {'type': 'MMDistributedDataParallel'}),
        )
    ):
        folder = work_dir / str(number)
        options = {}
        for loop in ('val', 'test'):
            options[f'{loop}_dataloader'] = make_cfg(work_dir)[
                'train_dataloader'
            ]
            options[f'{loop}_cfg'] = {}
            options[f'{loop}_evaluator'] = [Outputs()]
        if wrapper is not None:
            options['model_wrapper_cfg'] = wrapper
        runner = make_runner(folder, 'fp16', model=model, **options)
        runner.model.eval()
        with torch.no_grad():
            expected = model(options['val_dataloader']['dataset'].x, 'predict')
        metrics = runner.val(), runner.test()
        results.append(
            (
                [float(sum(x.sum() for x in expected))] * 2,
                [m['total'] for m in metrics],
                log_of(runner),
            )
        )
    return results


class Outputs(Improving):
    """The sum over the outputs of all samples."""

    def process(self, data_batch, data_samples):
        self.results += [float(x.sum()) for x in data_samples]

    def compute_metrics(self, results):
        return {'total': sum(results)}


def test_frozen_model_is_validated_and_tested(tmp_path):
    for results in run_ranks(run_frozen, tmp_path):
        for expected, found, log in results:
            assert found == pytest.approx(expected, rel=1e-5)
            assert "ddp_comm_hook='fp16' is not used" in log
