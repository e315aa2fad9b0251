"""A checkpoint that is named as trusted, with the hook state beside it."""

import torch

from tests.ranks import run_ranks
from tests.test_engine.toy_runner import log_of, make_runner

HOOK = {'type': 'int8', 'use_error_feedback': True}


class Command:
    """Pickles as a call."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, 'w')


def resume(rank, work_dir):
    make_runner(work_dir, HOOK, iters=2).train()
    path = work_dir / 'iter_2.pth'
    trace = work_dir / f'trace{rank}'
    torch.distributed.barrier()
    if rank == 0:
        content = torch.load(path, weights_only=False)
        content['x'] = Command(str(trace))
        torch.save(content, path)
    torch.distributed.barrier()
    options = {'iters': 4, 'resume': True}
    try:
        make_runner(work_dir, HOOK, load_from=str(path), **options).train()
    except ValueError as error:
        refused = str(error)
    runner = make_runner(
        work_dir, HOOK, load_from=f'trusted://{path}', **options
    )
    runner.train()
    return refused, runner.iter, log_of(runner) if rank == 0 else ''


def test_resume_is_safe_unless_trusted(tmp_path):
    results = run_ranks(resume, tmp_path)
    for refused, iterations, log in results:
        assert 'asks for' in refused
        assert 'open' in refused
        assert f'trusted://{tmp_path}' in refused
        assert iterations == 4
        assert 'not restored' not in log
    assert 'may run code' in results[0][2]
    assert (tmp_path / 'trace0').exists()
