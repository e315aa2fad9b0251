"""Random numbers that do not depend on what else is drawn."""

from zlib import crc32

import torch

__all__ = ['named_generator']


def named_generator(
    seed: int, name: str, device: torch.device | str = 'cpu'
) -> torch.Generator:
    """Return a new generator for one use.

    Not the global one, which belongs to the training; and the same numbers
    in every layout of the buckets.

    Args:
        seed: Not negative.
        name: Of the use, such as parameter, purpose and step.
        device: Of the numbers.
    """
    generator = torch.Generator(device)
    return generator.manual_seed((seed + crc32(name.encode())) % 2**63)
