"""Reading files of weights, without running code that they may hold."""

from .loaders import check_weights, read_weights, without_trust
from .reading import read_checkpoint

__all__ = [
    'check_weights',
    'read_checkpoint',
    'read_weights',
    'without_trust',
]
