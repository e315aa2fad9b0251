"""What a test may not leave behind."""

import contextlib
import gc
import os
import sys
import threading
import time
from pathlib import Path


class Traces:
    """What a call may not leave behind, as of now."""

    IGNORED = (
        # Set for each test, and reset after each call.
        'PYTEST_CURRENT_TEST',
        '_DEFAULT_FIRST_BUCKET_BYTES',
        # Set by libraries as they are imported.
        'TOKENIZERS_PARALLELISM',
        'TORCHINDUCTOR_CACHE_DIR',
    )
    # Modules that calls patch.
    PATCHED = (
        'torch.cuda',
        'torch.distributed',
        'torch.version',
        'mmengine.optim.optimizer.amp_optimizer_wrapper',
    )

    def __init__(self):
        self.threads = set(threading.enumerate())
        self.environ = dict(os.environ)
        self.attributes = {
            (owner, name): value
            for owner in self._owners()
            for name, value in vars(owner).items()
        }

    def _owners(self):
        """Modules that calls patch, and the package with its classes."""
        for name in self.PATCHED:
            if name in sys.modules:
                yield sys.modules[name]
        for name, module in list(sys.modules.items()):
            if name.split('.')[0] == 'mmcv_custom':
                yield module
                for value in vars(module).values():
                    if getattr(value, '__module__', None) == name:
                        if isinstance(value, type):
                            yield value

    def left_behind(self):
        """Describe the threads, groups, variables and patches since then."""
        threads = [
            thread
            for thread in set(threading.enumerate()) - self.threads
            # One of the backend's, that has run a callback.
            if not isinstance(thread, threading._DummyThread)
        ]
        if threads:
            gc.collect()  # perhaps of something in a reference cycle
        for thread in threads:
            thread.join(timeout=1)  # unless it is just ending
        changed = {
            name for name, _ in self.environ.items() ^ os.environ.items()
        }
        return [
            *(f'the thread {t.name!r}' for t in threads if t.is_alive()),
            *(f'the process group {name!r}' for name in _subgroups()),
            *(
                f'the environment variable {name}'
                for name in sorted(changed)
                if name not in self.IGNORED
            ),
            *(
                f'another {owner.__name__}.{name}'
                for (owner, name), value in self.attributes.items()
                if vars(owner).get(name) is not value
                and name not in self.IGNORED
            ),
        ]


def _subgroups():
    """Names of the process groups beside the default one."""
    dist = sys.modules.get('torch.distributed')
    if dist is None:
        return []
    from mmcv_custom.compression.groups import ENDS_GROUPS

    if not ENDS_GROUPS:
        return []
    names = dist.distributed_c10d._world.pg_names
    return [name for group, name in names.items() if group != dist.group.WORLD]


def group_lives(patience_s=1.0):
    """Tell whether gloo has a thread, as each group has until it is freed.

    Where threads have no names, as on torch 2.1, this is False.
    """
    deadline = time.monotonic() + patience_s
    while any('gloo' in name for name in _native_thread_names()):
        if time.monotonic() > deadline:
            return True
        time.sleep(0.01)
    return False


def _native_thread_names():
    for task in Path('/proc/self/task').glob('*/comm'):
        with contextlib.suppress(OSError):  # of one that has just ended
            yield task.read_text()
