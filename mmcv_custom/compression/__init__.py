"""Communication hooks that do more than cast, and the engine they share."""

from .compressor import Compressor
from .fp16_scaled import ScaledFP16
from .int8 import Int8
from .powersgd import PowerSGD

__all__ = ['Compressor', 'Int8', 'PowerSGD', 'ScaledFP16']
