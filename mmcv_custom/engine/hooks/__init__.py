from .compression import CompressionHook
from .wrapped_model import WrappedModelHook

__all__ = ['CompressionHook', 'WrappedModelHook']
