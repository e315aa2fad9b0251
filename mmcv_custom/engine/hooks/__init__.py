from .compression import CompressionHook
from .state_folders import StateFoldersHook
from .wrapped_model import WrappedModelHook

__all__ = ['CompressionHook', 'StateFoldersHook', 'WrappedModelHook']
