"""Which trainings a comparison consists of, and where each one's files are."""

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..benchmark.hooks import Choice
from ..benchmark.links import Rate

__all__ = ['Comparison', 'Training', 'hook_options', 'slug']

# What a folder of trainings was made with.
_SETTING = 'comparison.json'


@dataclass(frozen=True)
class Training:
    """A training of a comparison.

    Attributes:
        hook: It exchanges gradients with that.
        seed: Of weights, order of the data and augmentation.
        folder: Its work directory.
        options: For ``--cfg-options``, in all.
    """

    hook: Choice
    seed: int
    folder: Path
    options: list[str]


@dataclass(frozen=True)
class Comparison:
    """The same training with each hook, several times.

    Attributes:
        script: Starts a training, as ``tools/dist_train.sh`` does.
        config: The file that is trained.
        options: ``KEY=VALUE`` for all trainings.
        settings: The config with these options, as JSON has it.
        hooks: Plain DDP among them.
        seeds: Of each hook's trainings.
        processes: Of a training.
        rate: Of the link of each process's own machine; None leaves them on
            this one.
        folder: Of all trainings.
    """

    script: Path
    config: str
    options: list[str]
    settings: dict[str, Any]
    hooks: list[Choice]
    seeds: list[int]
    processes: int
    rate: Rate | None
    folder: Path

    @property
    def max_iters(self) -> int:
        """The iterations of a training."""
        return self.settings['train_cfg']['max_iters']

    def trainings(self) -> list[Training]:
        """Return them, seed by seed: what comes first compares all hooks."""
        replaces = 'ddp_comm_hook' in self.settings
        return [
            Training(
                hook,
                seed,
                self.folder / slug(hook) / f'seed{seed}',
                [
                    *self.options,
                    f'randomness.seed={seed}',
                    *hook_options(hook, replaces),
                ],
            )
            for seed in self.seeds
            for hook in self.hooks
        ]

    def claim_folder(self) -> None:
        """Make the folder, and note in it what is compared there.

        Raises:
            ValueError: If it holds trainings with other settings, which
                cannot be compared with these.
        """
        wanted = {
            'processes': self.processes,
            'rate': self.rate and self.rate.name,
            'config': self.settings,
        }
        note = self.folder / _SETTING
        if note.exists():
            there = json.loads(note.read_text())
            for key, old, new in _differences(there, wanted):
                raise ValueError(
                    f'{self.folder} holds trainings with {key}={old!r}, not '
                    f'{new!r}; take another --work-dir'
                )
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        # At once, or not at all: an interruption may come in between.
        new = note.with_suffix(f'.{os.getpid()}')
        new.write_text(json.dumps(wanted, indent=2) + '\n')
        new.replace(note)


def slug(hook: Choice) -> str:
    """Return the name of the folder of a hook's trainings.

    It is the hook's name and its knobs, sorted by name, such as
    ``int8-use_error_feedback=True``; characters that a shell would read are
    underscores.
    """
    name = hook.label.partition('(')[0]
    knobs = [f'{k}={v}' for k, v in (hook.config or {}).items() if k != 'type']
    return re.sub(r'[^\w.=-]', '_', '-'.join([name, *sorted(knobs)]))


def hook_options(hook: Choice, replaces: bool) -> list[str]:
    """Return the ``--cfg-options`` that set a hook.

    Args:
        hook: To set.
        replaces: Whether the config has one, whose knobs have to go.
    """
    if hook.config is None:
        return ['ddp_comm_hook=none']
    options = _flatten('ddp_comm_hook', hook.config)
    return ['ddp_comm_hook._delete_=True'] * replaces + options


def _flatten(key: str, value: Any) -> list[str]:
    if isinstance(value, dict) and value:
        parts = [_flatten(f'{key}.{name}', value[name]) for name in value]
        return [option for part in parts for option in part]
    # Quotes within the value keep a text from being read as something else.
    return [f'{key}="{value}"' if isinstance(value, str) else f'{key}={value}']


def _differences(
    there: Any, wanted: Any, path: str = ''
) -> list[tuple[str, Any, Any]]:
    """Where two contents of a JSON file differ: key, old and new value."""
    if not (isinstance(there, dict) and isinstance(wanted, dict)):
        return [] if there == wanted else [(path, there, wanted)]
    found = []
    for key in [*there, *(key for key in wanted if key not in there)]:
        name = f'{path}.{key}' if path else key
        found += _differences(there.get(key), wanted.get(key), name)
    return found
