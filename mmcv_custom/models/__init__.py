from .intern_vit import InternViT
from .norm_linear_head import NormLinearHead
from .pyramid_neck import PyramidNeck
from .segmentor import InternViTSegmentor

__all__ = ['InternViT', 'InternViTSegmentor', 'NormLinearHead', 'PyramidNeck']
