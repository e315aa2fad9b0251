"""A hook that finds out which hook is the fastest."""

from .hook import Auto

__all__ = ['Auto']
