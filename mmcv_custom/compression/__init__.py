"""The communication hooks of the config key, which count their bytes."""

from .average import BF16, FP16, AllReduce
from .compressor import Compressor
from .exchange import Exchange
from .fp16_scaled import ScaledFP16
from .int8 import Int8
from .powersgd import PowerSGD
from .training import Training

__all__ = [
    'BF16',
    'FP16',
    'AllReduce',
    'Compressor',
    'Exchange',
    'Int8',
    'PowerSGD',
    'ScaledFP16',
    'Training',
]
