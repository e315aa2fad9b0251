"""Compare trainings with several hooks and seeds.

``tools/compare_trainings.py`` is its command line.
"""
