"""Install with ``pip install -e '.[mmseg]'``."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION = re.search(
    r"__version__ = '(.+)'", (ROOT / 'mmcv_custom/__init__.py').read_text()
).group(1)

setup(
    name='mmcv_custom',
    version=VERSION,
    description='DDP gradient communication hooks for MMSegmentation',
    long_description=(ROOT / 'README.md').read_text(),
    long_description_content_type='text/markdown',
    packages=find_packages(include=['mmcv_custom', 'mmcv_custom.*']),
    package_data={'mmcv_custom': ['py.typed']},
    python_requires='>=3.10',
    install_requires=['torch>=2.1', 'torchvision', 'timm>=1.0.31', 'numpy'],
    extras_require={
        # The maintained forks of OpenMMLab's packages: the same import
        # names, and they install on a current torch.
        'mmseg': [
            'onedl-mmengine',
            'onedl-mmcv',
            'onedl-mmsegmentation',
            'ftfy',
            'regex',
        ],
        'tests': [
            'mypy',
            'pytest',
            'pytest-timeout',
            'ruff',
            'transformers',
        ],
    },
)
