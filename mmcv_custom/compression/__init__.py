"""Communication hooks that do more than cast, and what they share."""

from .compressor import Compressor
from .fp16_scaled import ScaledFP16
from .int8 import Int8
from .powersgd import PowerSGD
from .training import Training

__all__ = ['Compressor', 'Int8', 'PowerSGD', 'ScaledFP16', 'Training']
