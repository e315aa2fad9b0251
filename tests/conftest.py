"""What every test of this suite relies on."""

import os

import pytest

# Several processes share the cores: more threads each only get in the way.
os.environ.setdefault('OMP_NUM_THREADS', '1')


def pytest_configure(config):
    config.addinivalue_line(
        'markers', 'gloo_bf16: needs a gloo that can reduce bfloat16'
    )


def pytest_runtest_setup(item):
    if item.get_closest_marker('gloo_bf16') is not None:
        import torch

        from tests.ranks import gloo_reduces

        if not gloo_reduces(torch.bfloat16):
            pytest.skip(f'gloo of torch {torch.__version__} has no bfloat16')
