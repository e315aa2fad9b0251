"""What torch's wrappers put before the names of parameters."""

__all__ = ['COMPILED', 'PARALLEL', 'plain_name']

COMPILED = '_orig_mod.'  # torch.compile, wherever a compiled part stands
CHECKPOINTED = '_checkpoint_wrapped_module.'  # activation checkpointing, too
PARALLEL = 'module.'  # DataParallel and DistributedDataParallel, in front


def plain_name(name: str) -> str:
    """Return a parameter's name in the model as it was written."""
    return name.replace(COMPILED, '').replace(CHECKPOINTED, '')
