"""What a compressor may want to know of the training."""

import logging
from dataclasses import dataclass

__all__ = ['Training']


@dataclass(frozen=True)
class Training:
    """Facts of the training that is about to start.

    Attributes:
        steps: How many optimizer steps it has.
        warmup_steps: After how many of them the learning rate's warm-up
            ends; None if there is none.
        logger: For what the user should know.
    """

    steps: int
    warmup_steps: int | None
    logger: logging.Logger
