from .compression import CompressionHook
from .exchange_cost import ExchangeCostHook
from .state_folders import StateFoldersHook
from .wrapped_model import WrappedModelHook

__all__ = [
    'CompressionHook',
    'ExchangeCostHook',
    'StateFoldersHook',
    'WrappedModelHook',
]
