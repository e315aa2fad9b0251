"""Reading files of weights, without running code that they may hold."""

from .loaders import read_weights, without_trust
from .reading import read_checkpoint

__all__ = ['read_checkpoint', 'read_weights', 'without_trust']
