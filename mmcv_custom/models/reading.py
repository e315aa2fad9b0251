"""Reading the files that weights come in."""

import json
import logging
import os
import pickle
from collections.abc import Mapping
from typing import Any

import torch
from mmengine.logging import print_log
from mmengine.runner.checkpoint import CheckpointLoader

__all__ = ['read_weights', 'unwrap_state_dict']


def read_weights(path: str) -> dict[str, Any]:
    """Read the tensors of a file, in safe mode where the file allows it.

    Args:
        path: A checkpoint of torch, a `.safetensors` file, the
            `.index.json` of a sharded one, or a URL that MMEngine knows.

    Returns:
        Names and tensors, on the CPU, in the layout of the file.

    Raises:
        FileNotFoundError: No such file.
    """
    if path.endswith('.index.json'):
        with open(path, encoding='utf-8') as file:
            shards = sorted(set(json.load(file)['weight_map'].values()))
        weights = {}
        for shard in shards:
            weights.update(
                read_weights(os.path.join(os.path.dirname(path), shard))
            )
        return weights
    if path.endswith('.safetensors'):
        from safetensors.torch import load_file

        return load_file(path)
    return unwrap_state_dict(_read_torch(path))


def _read_torch(path: str) -> dict[str, Any]:
    if os.path.isfile(path):
        try:
            return torch.load(path, map_location='cpu', weights_only=True)
        except pickle.UnpicklingError as error:
            # MMEngine's own checkpoints carry its log buffers.
            print_log(
                f'{path} holds more than tensors ({error}). It is read with '
                "MMEngine's loader, which may execute code from the file: "
                'use files from sources you trust.',
                logger='current',
                level=logging.WARNING,
            )
    return CheckpointLoader.load_checkpoint(
        path, map_location='cpu', logger='current'
    )


def unwrap_state_dict(weights: Mapping) -> dict[str, Any]:
    """Take the weights out of `state_dict` and `module`, where present."""
    for key in ('state_dict', 'module'):
        if isinstance(weights.get(key), Mapping):
            weights = weights[key]
    return dict(weights)
