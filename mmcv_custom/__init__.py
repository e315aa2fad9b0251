"""Gradient communication hooks for MMSegmentation training with DDP."""

__version__ = '0.1.0'
