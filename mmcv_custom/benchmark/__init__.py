"""Measure communication hooks: what they send, lose and gain.

``tools/benchmark_comm_hooks.py`` is its command line.
"""
