"""A cluster that a training may run on, as a command line has it."""

from collections.abc import Sequence
from dataclasses import dataclass

from ..compression.topology import Topology
from ..engine.hook_names import alternatives
from .links import Rate

__all__ = ['Cluster']

_EXAMPLE = 'nodes=8 ranks_per_node=8 rate=25gbit'
_KEYS = [word.partition('=')[0] for word in _EXAMPLE.split()]
_MOST_RANKS = 2**14  # all of which are gone through


@dataclass(frozen=True)
class Cluster:
    """Equal machines (nodes), each with one link to all others.

    Attributes:
        nodes: How many.
        ranks_per_node: How many ranks on each.
        rate: Of its link, in each direction.
    """

    nodes: int
    ranks_per_node: int
    rate: Rate

    @classmethod
    def parse(cls, words: Sequence[str]) -> 'Cluster':
        """Read ``nodes=8 ranks_per_node=8 rate=25gbit``.

        Args:
            words: In any order; several may stand in one.

        Raises:
            ValueError: If something is missing, unknown, there twice, or out
                of range.
        """
        given: dict[str, str] = {}
        for word in ' '.join(words).split():
            key, equals, value = word.partition('=')
            if not equals:
                raise _error(f'{word!r} is not of the form KEY=VALUE')
            if key not in _KEYS:
                raise _error(f'{key!r}: {alternatives(key, _KEYS)}')
            if key in given:
                raise _error(f'{key} is there twice; a cluster has its own')
            given[key] = value
        for key in _KEYS:
            if key not in given:
                raise _error(f'{key} is missing')
        # Within one machine no link limits anything.
        nodes = _count('nodes', given['nodes'], 2)
        ranks = _count('ranks_per_node', given['ranks_per_node'], 1)
        if nodes * ranks > _MOST_RANKS:
            raise _error(f'{nodes * ranks} ranks are more than {_MOST_RANKS}')
        try:
            return cls(nodes, ranks, Rate.parse(given['rate']))
        except ValueError as error:
            raise _error(str(error)) from None

    @property
    def topology(self) -> Topology:
        """Consecutive ranks share a machine."""
        size = self.nodes * self.ranks_per_node
        ranks, step = range(size), self.ranks_per_node
        return Topology(
            tuple(tuple(ranks[i : i + step]) for i in range(0, size, step))
        )

    def __str__(self) -> str:
        return f'{self.topology}, {self.rate.name} per node'


def _count(key: str, text: str, least: int) -> int:
    if not text.isdecimal() or int(text) < least:
        raise _error(f'{key}={text} must be a number from {least}')
    return int(text)


def _error(fault: str) -> ValueError:
    return ValueError(f'--predict: {fault}; write --predict {_EXAMPLE}')
