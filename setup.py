"""For tools that look for this file; all is said in pyproject.toml."""

from setuptools import setup

setup()
