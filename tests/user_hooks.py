"""Hooks as users write them, in every form of the contract, good and bad.

The future import is on purpose: it turns the annotations into strings, which
torch alone refuses.
"""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist


def _mean(bucket):
    buffer = bucket.buffer()
    dist.all_reduce(buffer.div_(dist.get_world_size()))
    return buffer


class WaitOnly:
    def __init__(self, result):
        self._result = result

    def wait(self):
        return self._result


class ValueOnly:
    def __init__(self, result):
        self._result = result

    def value(self):
        return self._result


class WaitThenValue(ValueOnly):
    def wait(self):
        return None


def returns_tensor(state: object, bucket: dist.GradBucket) -> torch.Tensor:
    return _mean(bucket)


def returns_list(state, bucket):
    return [_mean(bucket)]


def returns_wait_only(state, bucket):
    return WaitOnly(_mean(bucket))


def returns_value_only(state, bucket):
    return ValueOnly(_mean(bucket))


def returns_wait_then_value(state, bucket):
    return WaitThenValue(_mean(bucket))


def returns_future(
    state, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    buffer = bucket.buffer().div_(dist.get_world_size())
    work = dist.all_reduce(buffer, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def returns_future_of_list(state, bucket):
    buffer = bucket.buffer().div_(dist.get_world_size())
    return dist.all_reduce(buffer, async_op=True).get_future()


def returns_done_future(process_group, grad_bucket):
    future = torch.futures.Future()
    future.set_result(_mean(grad_bucket))
    return future


def returns_strided(state, bucket):
    mean = _mean(bucket)
    return torch.stack([mean, torch.full_like(mean, 7)], dim=1)[:, 0]


def returns_offset(state, bucket):
    mean = _mean(bucket)
    return torch.cat([torch.full_like(mean[:3], 7), mean])[3:]


def returns_flipped_view_of_the_bucket(state, bucket):
    # A view on the bucket's storage that starts elsewhere and runs backward.
    mean = _mean(bucket)
    mean.copy_(mean.flip(0))
    return mean.flip(0)


def returns_column(state, bucket):
    return _mean(bucket).clone().view(-1, 1)


def returns_float64(state, bucket):
    return _mean(bucket).double()


def returns_set_buffer(state, bucket):
    bucket.set_buffer(_mean(bucket).clone())
    return bucket.buffer()


def counts_bytes(state, bucket):
    # Dynamo cannot trace it once it takes the size of a bucket for variable.
    mean = _mean(bucket)
    counts_bytes.total += mean.nbytes
    return mean


counts_bytes.total = 0


def scaled(state, bucket, factor=1.0):
    return _mean(bucket).mul_(factor)


class Stateful:
    """A hook class with knobs, for the registry."""

    def __init__(self, process_group=None, factor=1.0):
        if not factor > 0:
            raise ValueError(f'factor must be positive, got {factor}')
        self.process_group = process_group
        self.factor = factor

    def __call__(self, state, bucket):
        return _mean(bucket).mul_(self.factor)

    def method(self, state, bucket):
        return self(state, bucket)


GOOD = {
    f.__name__: f
    for f in (
        returns_tensor,
        returns_list,
        returns_wait_only,
        returns_value_only,
        returns_wait_then_value,
        returns_future,
        returns_future_of_list,
        returns_done_future,
        returns_strided,
        returns_offset,
        returns_flipped_view_of_the_bucket,
        returns_column,
        returns_float64,
        returns_set_buffer,
    )
} | {
    'partial': functools.partial(scaled, factor=1.0),
    'bound method': Stateful().method,
    'callable object': Stateful(),
    'lambda': lambda s, b: _mean(b),
}


def gives_none(state, bucket):
    _mean(bucket)


def gives_work(state, bucket):
    return dist.all_reduce(bucket.buffer(), async_op=True)


def gives_number(state, bucket):
    return float(_mean(bucket).sum())


def gives_bucket(state, bucket):
    return bucket


def gives_two(state, bucket):
    return [_mean(bucket), bucket.buffer()]


def gives_short(state, bucket):
    return _mean(bucket)[:-1]


def gives_long(state, bucket):
    return torch.cat([_mean(bucket), torch.zeros(1)])


def gives_complex(state, bucket):
    return _mean(bucket).to(torch.complex64)


def gives_bool(state, bucket):
    return _mean(bucket) > 0


def gives_sparse(state, bucket):
    return _mean(bucket).to_sparse()


def gives_short_later(state, bucket):
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0][:-1])


def gives_collected(state, bucket):
    return torch.futures.collect_all([_future_of(_mean(bucket))])


def gives_wait_on_number(state, bucket):
    return WaitOnly(3)


def _future_of(value):
    future = torch.futures.Future()
    future.set_result(value)
    return future


def gives_future_of_none(state, bucket):
    return _future_of(None)


def gives_future_in_future(state, bucket):
    return _future_of(_future_of(_mean(bucket)))


def gives_future_of_short(state, bucket):
    return _future_of(_mean(bucket)[:-1])


BAD = {
    gives_none: 'TypeError: .*returned None',
    gives_work: 'TypeError: .*returned a Work',
    gives_number: 'TypeError: .*returned a float',
    gives_bucket: 'TypeError: .*returned a GradBucket',
    gives_two: 'TypeError: .*returned a list',
    gives_short: 'ValueError: .*returned 20 elements for a buffer of 21',
    gives_long: 'ValueError: .*returned 22 elements for a buffer of 21',
    gives_complex: 'TypeError: .*returned a torch.complex64',
    gives_bool: 'TypeError: .*returned a torch.bool tensor',
    gives_sparse: 'TypeError: .*returned a tensor that cannot be copied',
    gives_short_later: 'RuntimeError: .*ValueError: .*returned 20 elements',
    gives_collected: 'RuntimeError: .*returned a future inside a future',
    gives_wait_on_number: 'TypeError: .*returned a int',
    gives_future_of_none: 'TypeError: .*returned None',
    gives_future_in_future: 'TypeError: .*returned a future inside a future',
    gives_future_of_short: 'ValueError: .*returned 20 elements',
}


def raises(state, bucket):
    raise ArithmeticError('a fault of the hook')


def needs_knob(state, bucket, rank):
    return _mean(bucket)


def raises_on_rank_1(state, bucket):
    if dist.get_rank() == 1:
        raise ArithmeticError('a fault of rank 1')
    return returns_future(state, bucket)


def one(bucket):
    return _mean(bucket)


def positional(state, bucket, factor=1.0, /):
    return _mean(bucket).mul_(factor)
