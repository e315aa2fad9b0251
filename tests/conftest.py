"""What every test of this suite relies on."""

import os

import pytest

from tests.traces import Traces

# Several processes share the cores: more threads each only get in the way.
for variable in ('OMP_NUM_THREADS', 'MKL_NUM_THREADS'):
    os.environ.setdefault(variable, '1')


def pytest_configure(config):
    config.addinivalue_line(
        'markers', 'gloo_bf16: needs a gloo that can reduce bfloat16'
    )


def pytest_report_header(config):
    return (
        f'marks: {config.option.markexpr or "all"} '
        '(pytest -m "" runs all tests)'
    )


def pytest_runtest_setup(item):
    if item.get_closest_marker('gloo_bf16') is not None:
        import torch

        from tests.ranks import gloo_reduces

        if not gloo_reduces(torch.bfloat16):
            pytest.skip(f'gloo of torch {torch.__version__} has no bfloat16')


@pytest.fixture(autouse=True)
def _nothing_left_behind():
    before = Traces()
    yield
    left = before.left_behind()
    assert not left, f'the test has left behind {", ".join(left)}'
