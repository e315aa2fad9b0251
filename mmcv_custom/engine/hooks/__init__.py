from .compression import CompressionHook

__all__ = ['CompressionHook']
