"""How many bytes of gradients a step sends."""

from typing import Any

from torch.nn.parallel import DistributedDataParallel

from ..compression.collective import Traffic
from ..compression.gradient import is_compressible
from ..compression.topology import find_topology
from ..parameters import reduced_parameters

__all__ = ['StepBytes']


class StepBytes:
    """What steps send, beside what DDP's own all-reduce would send.

    That is a ring of all ranks, of gradients in the parameters' dtype. All
    ranks have to make this alike: perhaps they find out their topology.

    Args:
        ddp: The wrapped model.
        instance: Of its hook, which counts in ``sent_bytes`` and perhaps
            ``node_sent_bytes``; None if DDP's own all-reduce is used.

    Attributes:
        wide_ratio: How many times fewer bytes the gradients would be if none
            had more than 16 bits.
    """

    def __init__(
        self, ddp: DistributedDataParallel, instance: Any = None
    ) -> None:
        parameters = [*reduced_parameters(ddp).values()]
        group, device = ddp.process_group, parameters[0].device
        topology = getattr(instance, 'topology', None)
        if topology is None:
            topology = find_topology(group, device)
        nbytes = sum(p.numel() * p.element_size() for p in parameters)
        raw = Traffic('all_reduce', nbytes).sent(topology, group.rank())
        self._raw = {'': raw.rank}
        if len(topology.nodes) > 1 and (
            instance is None or hasattr(instance, 'node_sent_bytes')
        ):
            self._raw['node_'] = raw.node
        self.wide_ratio = nbytes / sum(
            p.numel() * (2 if is_compressible(p) else p.element_size())
            for p in parameters
        )
        self._instance = instance
        self._counted = self._count()

    def take(self, steps: int) -> dict[str, float]:
        """Return what a step sent on average since the last call, in MiB.

        Args:
            steps: Their number, at least 1.

        Returns:
            Of this rank, ``raw_mib`` and ``sent_mib``, without and with the
            hook; and where there are several machines, with ``node_`` before
            the names, of its machine to others.
        """
        before, self._counted = self._counted, self._count()
        mib = {}
        for whose, raw in self._raw.items():
            sent = raw
            if self._instance is not None:
                sent = (self._counted[whose] - before[whose]) / steps
            mib[f'{whose}raw_mib'] = raw / 2**20
            mib[f'{whose}sent_mib'] = sent / 2**20
        return mib

    def _count(self) -> dict[str, int]:
        return {
            whose: getattr(self._instance, f'{whose}sent_bytes', 0)
            for whose in self._raw
        }
