"""A fixed fraction of the ADE20K training images."""

import numpy as np
from mmseg.registry import DATASETS

from .label_maps import CheckedADE20KDataset

__all__ = ['FewShotADE20KDataset', 'choose_subset']


def choose_subset(num_samples: int, fraction: float, seed: int) -> list[int]:
    """Choose a fixed part of ``range(num_samples)``.

    The choice has a generator of its own: it depends on the arguments alone,
    is the same on every rank and leaves the global random state untouched.
    Subsets of one seed are nested, so a larger fraction only adds samples.

    Args:
        num_samples: Size of the whole set.
        fraction: Part to keep, in (0, 1].
        seed: Seed of the choice, not negative.

    Returns:
        The chosen indices in increasing order.

    Raises:
        ValueError: If an argument is out of range or no sample would be left.
    """
    _check_choice(fraction, seed)
    keep = round(num_samples * fraction)
    if keep < 1:
        raise ValueError(
            f'fraction={fraction} of {num_samples} samples keeps '
            'none: is the data set complete?'
        )
    order = np.random.default_rng(seed).permutation(num_samples)
    return sorted(order[:keep].tolist())


def _check_choice(fraction: float, seed: int) -> None:
    if not isinstance(fraction, (int, float)) or not 0 < fraction <= 1:
        raise ValueError(f'fraction must be in (0, 1], got {fraction!r}')
    if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
        raise ValueError(f'subset_seed must be an integer >= 0, got {seed!r}')


@DATASETS.register_module()
class FewShotADE20KDataset(CheckedADE20KDataset):
    """ADE20K reduced to a fraction of its images, fixed by a seed.

    Args:
        fraction: Part of the images to keep, in (0, 1].
        subset_seed: Seed of the choice; it is not the seed of the training.
        **kwargs: Arguments of ``ADE20KDataset``.

    Raises:
        ValueError: If ``fraction`` or ``subset_seed`` is out of range, or the
            folder holds too few images for the fraction.
    """

    def __init__(
        self, fraction: float, subset_seed: int = 0, **kwargs
    ) -> None:
        # Checked before the files are listed, which may take long or fail.
        _check_choice(fraction, subset_seed)
        self.fraction = fraction
        self.subset_seed = subset_seed
        super().__init__(**kwargs)

    def load_data_list(self) -> list[dict]:
        """List the chosen samples, in the order of their file names."""
        samples = super().load_data_list()
        chosen = choose_subset(len(samples), self.fraction, self.subset_seed)
        return [samples[index] for index in chosen]
