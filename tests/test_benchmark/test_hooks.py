"""Hooks on a command line."""

import pytest

from mmcv_custom.benchmark.hooks import DEFAULT_HOOKS, Choice, choose

TORCHS = (
    'torch.distributed.algorithms.ddp_comm_hooks.default_hooks.'
    'fp16_compress_hook'
)


def test_names_and_knobs():
    texts = [
        'none',
        'FP16',
        'bf16_compress_hook',
        "dict(type='int8', use_error_feedback=True)",
        "{'type': 'fp16_scaled', 'wrapper': 'bf16'}",
        TORCHS,
    ]
    choices = choose(texts)
    assert [choice.label for choice in choices] == [
        'none',
        'fp16',
        'bf16',
        'int8(use_error_feedback=True)',
        'fp16_scaled(wrapper=bf16)',
        'default_hooks.fp16_compress_hook',
    ]
    assert choices[0].config is None
    assert choices[3].config == {'type': 'int8', 'use_error_feedback': True}
    assert choices[5].config == {'type': TORCHS}


def test_plain_ddp_is_added():
    assert choose(['int8'])[0] == Choice('none', None)
    assert [choice.label for choice in choose(['int8', 'none'])] == [
        'int8',
        'none',
    ]


def test_default():
    assert len(choose([*DEFAULT_HOOKS])) == 6


@pytest.mark.parametrize(
    ('given', 'start'),
    [('', 'warmup_end'), (", start_powerSGD_iter='warmup_end'", 'warmup_end')]
    + [(f', start_powerSGD_iter={n}', n) for n in (2, 3)],
)
def test_hook_compresses_when_it_is_measured(given, start):
    choice = choose([f"dict(type='powersgd'{given})"])[1]
    assert choice.config['start_powerSGD_iter'] == start
    assert ('start' in choice.label) == bool(given)


@pytest.mark.parametrize(
    ('text', 'error', 'message'),
    [
        ('fp15', ValueError, "unknown ddp_comm_hook 'fp15'.*did you mean"),
        ("dict(type='int8', rank=4)", ValueError, "has no knob 'rank'"),
        ("dict(type='int8', random_seed=-1)", ValueError, 'random_seed=-1'),
        ("dict(type='int8'", ValueError, 'cannot read the hook'),
        ("dict('int8')", ValueError, 'values without a name'),
        ("dict(**{'type': 'int8'})", ValueError, 'values without a name'),
        ("str(type='int8')", ValueError, 'unknown ddp_comm_hook'),
        ("dict(type=str('int8'))", ValueError, 'something else than dict'),
        ('dict(type=int8)', ValueError, 'cannot read the hook'),
        ("{'int8'}", ValueError, 'cannot read the hook'),
        (
            "dict(type='powersgd', start_powerSGD_iter=4)",
            ValueError,
            'would not compress within the 4 steps',
        ),
    ],
)
def test_bad_hook(text, error, message):
    with pytest.raises(error, match=message):
        choose(['fp16', text])


def test_hook_named_twice():
    with pytest.raises(ValueError, match='fp16 is named twice'):
        choose(['fp16', 'int8', 'fp16_compress_hook'])


class Picky:
    """A hook that does not take every knob."""

    def __init__(self, knob=1):
        if knob == 'absent':
            raise OSError('there is no such file')

    def __call__(self, state, bucket):
        raise NotImplementedError


def test_refused_knob_names_its_hook():
    text = f"dict(type='{__name__}.Picky', knob='absent')"
    with pytest.raises(ValueError, match=r'hook dict\(.*Picky.*: there is no'):
        choose(['fp16', text])


@pytest.mark.parametrize('knob', ['{1, 2}', "b'1'", '[1, 2j]'])
def test_knob_that_no_report_can_have(knob):
    text = f"dict(type='{__name__}.Picky', knob=dict(a={knob}))"
    with pytest.raises(ValueError, match=r'Picky.* is not JSON serializable'):
        choose([text])
