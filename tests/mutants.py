"""Break the package on purpose, and see whether the tests notice.

Run as ``python -m tests.mutants``. Each mutant is applied to a copy of the
package, on which the tests that must catch it are run. The exit status is 1
if one survives.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Mutant:
    """A fault as a replacement in one file.

    Attributes:
        name: What is wrong with it.
        path: Of the file, below ``mmcv_custom``.
        old: Text that the file has exactly once.
        new: What it becomes.
        tests: Files or ids, below ``tests``, that must fail.
    """

    name: str
    path: str
    old: str
    new: str
    tests: tuple[str, ...]

    def apply(self, root):
        """Change the file below a repository's root."""
        path = Path(root) / 'mmcv_custom' / self.path
        text = path.read_text()
        if text.count(self.old) != 1:
            raise ValueError(
                f'mutant {self.name!r}: {self.path} has its text '
                f'{text.count(self.old)} times, not once:\n{self.old}'
            )
        path.write_text(text.replace(self.old, self.new))


COMPRESSORS = [
    Mutant(
        'stages share a process group',
        'compression/pipeline.py',
        'collective.issue(self.groups[stage][traffic.scope])',
        'collective.issue(self.groups[0][traffic.scope])',
        ('test_compression/test_soak.py::test_soak[int8]',),
    ),
    Mutant(
        'buckets overtake each other between stages',
        'compression/pipeline.py',
        '            self.inboxes[stage].put(part)\n',
        """\
            part.works[-1].get_future().then(
                lambda _: self.inboxes[stage].put(part)
            )
""",
        ('test_compression/test_soak.py::test_soak[int8]',),
    ),
    Mutant(
        'rounding of the wire is not fed back',
        'compression/projection.py',
        'sent = wire.to(torch.float32, copy=True)\n',
        'sent = packed.clone()\n',
        (
            'test_compression/test_powersgd.py::'
            'test_sent_plus_residual_is_the_input',
        ),
    ),
    Mutant(
        'residual from the mean, not from the own contribution',
        'compression/projection.py',
        'self.basis.subtract(self._values, self.own)',
        'self.basis.subtract(self._values, self.mean)',
        (
            'test_compression/test_powersgd.py::'
            'test_equals_the_projection_in_float64',
        ),
    ),
    Mutant(
        'rounding of the mean is not scaled by the world size',
        'compression/int8.py',
        'rests = rests.mul_(own[1])',
        'pass',
        ('test_compression/test_int8.py::test_feedback_loses_nothing',),
    ),
    Mutant(
        'all ranks round by the same noise',
        'compression/int8.py',
        '{use} {self.group.rank()} {self.step}',
        '{use} {self.step}',
        ('test_compression/test_noise.py',),
    ),
    Mutant(
        'basis from local factors, not from averaged ones',
        'compression/powersgd.py',
        'basis.next(projection.mean))',
        'basis.next(projection.own))',
        (
            'test_compression/test_powersgd.py::'
            'test_equals_the_projection_in_float64',
        ),
    ),
    Mutant(
        'second half on the local left factor, not on the averaged one',
        'compression/powersgd.py',
        'left = basis.next(projection.mean)',
        'left = basis.next(projection.own)',
        (
            'test_compression/test_powersgd_whole.py::'
            'test_equals_an_iteration_in_float64',
        ),
    ),
    Mutant(
        'product computed where the bucket lies',
        'compression/matrix.py',
        ' or out.data_ptr() % (4 * _ALIGNMENT)',
        '',
        (
            'test_compression/test_matrix.py::'
            'test_bits_do_not_depend_on_the_buckets',
        ),
    ),
    Mutant(
        'state of a step that is not finite is accepted',
        'compression/compressor.py',
        '        self._end_step(finite)\n',
        '        self._end_step(True)\n',
        ('test_compression/test_nonfinite.py',),
    ),
]

# What may go wrong in hooks as simple as torch's.
HOOKS = [
    Mutant(
        'division after the sum',
        'ddp_hooks.py',
        """\
    tensor.div_(group.size())
    work = dist.all_reduce(tensor, group=group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])
""",
        """\
    work = dist.all_reduce(tensor, group=group, async_op=True)
    return work.get_future().then(
        lambda future: future.value()[0].div_(group.size())
    )
""",
        ('test_ddp_hooks.py::test_divides_before_it_sums',),
    ),
    Mutant(
        'no cast',
        'ddp_hooks.py',
        '_average(process_group, buffer.to(dtype))',
        '_average(process_group, buffer)',
        ('test_ddp_hooks.py::test_equals_torchs_hook_bit_for_bit',),
    ),
    Mutant(
        'future of another bucket',
        'ddp_hooks.py',
        """\
    return work.get_future().then(lambda future: future.value()[0])
""",
        """\
    future = work.get_future().then(lambda future: future.value()[0])
    _average.last_two = [*getattr(_average, 'last_two', []), future][-2:]
    return _average.last_two[0]
""",
        ('test_ddp_hooks.py::test_equals_torchs_hook_bit_for_bit',),
    ),
    Mutant(
        'wrapper that returns 16 bits',
        'ddp_hooks.py',
        """\
        bucket.set_buffer(buffer)
        return buffer

""",
        """\
        bucket.set_buffer(buffer)
        return future.value()

""",
        ('test_ddp_hooks.py::test_future_yields_the_buckets_own_buffer',),
    ),
]
STATISTICS = [
    Mutant(
        'the first step is timed like any other',
        'engine/exchange_times.py',
        '_FIRST_READ = 2',
        '_FIRST_READ = 1',
        ('test_engine/test_exchange_pieces.py',),
    ),
    Mutant(
        'the bytes since the start are told as those of a step',
        'engine/exchange_bytes.py',
        '(self._counted[whose] - before[whose]) / steps',
        'self._counted[whose] / steps',
        (
            'test_engine/test_exchange_cost.py::'
            'test_bytes_are_those_of_the_counters',
        ),
    ),
    Mutant(
        'the calls of a hook that waits are not a cost',
        'engine/exchange_times.py',
        '1e3 * (wait_s + busy_s)',
        '1e3 * wait_s',
        (
            'test_engine/test_exchange_cost.py::'
            'test_times_of_every_kind_of_hook',
        ),
    ),
]
MUTANTS = [*COMPRESSORS, *HOOKS, *STATISTICS]


def fails(tests, mutant=None):
    """Tell whether tests fail on a copy of the repository.

    Args:
        tests: Files or ids below ``tests``.
        mutant: Applied to the copy first.

    Raises:
        RuntimeError: If they neither pass nor fail.
    """
    with tempfile.TemporaryDirectory() as copy:
        for name in ('mmcv_custom', 'tests'):
            shutil.copytree(
                ROOT / name,
                f'{copy}/{name}',
                ignore=shutil.ignore_patterns('__pycache__'),
            )
        shutil.copy(ROOT / 'pyproject.toml', copy)
        if mutant is not None:
            mutant.apply(copy)
        ids = [f'tests/{test}' for test in tests]
        result = subprocess.run(
            [sys.executable, '-m', 'pytest', '-x', '-m', '', *ids],
            cwd=copy,
            env={**os.environ, 'PYTHONPATH': copy},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    if result.returncode not in (0, 1):
        raise RuntimeError(f'pytest could not run:\n{result.stdout}')
    return result.returncode == 1


def main():
    tests = {test: None for mutant in MUTANTS for test in mutant.tests}
    if fails(tests):
        raise SystemExit('the tests fail on the package as it is')
    survived = []
    for mutant in MUTANTS:
        start = time.monotonic()
        caught = fails(mutant.tests, mutant)
        seconds = time.monotonic() - start
        print(
            f'{"caught" if caught else "SURVIVED":8} {mutant.name} '
            f'({seconds:.0f} s)',
            flush=True,
        )
        if not caught:
            survived.append(mutant)
    print(f'{len(MUTANTS) - len(survived)} of {len(MUTANTS)} were caught')
    return bool(survived)


if __name__ == '__main__':
    raise SystemExit(main())
