"""What all hooks have in common whose exchange has stages."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ..contract import Future, completed, dense_buffer
from ..parameters import reduced_parameters
from ..profiling import named_stages
from .collective import Collective, Sent, Traffic, all_reduce, sum_sent
from .gradient import cut
from .knobs import check_knob
from .pipeline import Pipeline
from .share import Share
from .topology import Scope, Topology, find_topology
from .training import Training

__all__ = ['Exchange']

_UNBOUND = Topology(((0,),))


class Exchange(ABC):
    """A communication hook that exchanges buckets in stages.

    An instance is the hook: ``ddp.register_comm_hook(None,
    adapt_hook(Int8().bind(ddp)))``. The future it returns yields the bucket's
    own buffer, averaged.

    Where several ranks share a machine, and there are several machines, some
    methods can sum within the machine first, and exchange what is left
    between the machines: see ``node_stages``.

    Args:
        node_aware: Whether to; None leaves it to the method, and to the kind
            of device: NCCL's own algorithms know the nodes.
        ranks_per_node: So many consecutive ranks share a machine; None finds
            out.

    Attributes:
        topology: Which ranks share a machine; of the bound model.

    Raises:
        TypeError, ValueError: For a knob of another type or out of range.
    """

    # That the pipeline issues for a bucket, one after the other, at most.
    collectives = 1
    # Between whom they run, if the method knows the nodes.
    node_stages: Sequence[Scope] = ()
    # On which kinds of device it does so without being told.
    _node_aware_on: Sequence[str] = ()
    # On CPU a bucket is cut into parts of so many elements, or more; None
    # leaves it whole.
    _part_numel: int | None = None

    def __init__(
        self,
        node_aware: bool | None = None,
        ranks_per_node: int | None = None,
    ) -> None:
        if node_aware is not None:
            check_knob('node_aware', node_aware)
        if ranks_per_node is not None:
            check_knob('ranks_per_node', ranks_per_node, 1)
        self._node_aware = node_aware
        self._ranks_per_node = ranks_per_node
        self._group: dist.ProcessGroup | None = None  # until it is bound
        self._pipeline: Pipeline | None = None
        self._parameters: dict[str, torch.nn.Parameter] = {}
        self._names: dict[int, str] = {}
        self.topology = _UNBOUND
        self._device_type = 'cpu'  # of its gradients
        self._is_part = False  # of the world
        self._share = Share()

    def bind(self, ddp: DistributedDataParallel) -> 'Exchange':
        """Take the process group and the parameters of a wrapped model, once.

        All ranks of its group have to call this alike; returns itself. What
        it starts ends with :meth:`close`.

        Raises:
            RuntimeError: If it is bound already.
            ValueError: If ``ranks_per_node`` does not divide the ranks.
        """
        if self._group is not None:
            raise RuntimeError(f'{type(self).__name__} is bound already')
        group = ddp.process_group
        parameters = reduced_parameters(ddp)
        device = next(iter(parameters.values())).device
        self._device_type = device.type
        self._is_part = group.size() < dist.get_world_size()
        topology = find_topology(
            group, device, None if self._is_part else self._ranks_per_node
        )
        stages: Sequence[Scope] = ['all'] * self.collectives
        self._share = self.share_in(topology, device.type, group.rank())
        if self.is_node_aware:
            stages = self.node_stages
        if stages:
            self._pipeline = Pipeline(group, device, topology, stages)
        self._group, self.topology = group, topology
        self._parameters = parameters
        self._names = {id(p): name for name, p in parameters.items()}
        self._prepare(ddp)
        return self

    def __call__(self, state: Any, bucket: dist.GradBucket) -> Future:
        """Average a bucket; the buffer, of shape (numel,), is overwritten.

        Args:
            state: Not used.
            bucket: Gradients of the model that was bound.

        Raises:
            RuntimeError: Without :meth:`bind`, or if an earlier exchange
                failed.
            TypeError: If the gradients are sparse.
        """
        pipeline = self.pipeline
        buffer = dense_buffer(type(self).__name__, bucket)
        if not buffer.numel():
            return completed(buffer)
        name = type(self).__name__
        parts = [
            named_stages(name, bucket, self._exchange(*part))
            for part in self._cut(buffer, bucket.parameters())
        ]
        return pipeline.start(parts, buffer)

    @property
    def group(self) -> dist.ProcessGroup:
        """Of the bound model."""
        if self._group is None:
            raise RuntimeError(
                f'{type(self).__name__}: call bind(ddp) before registering'
            )
        return self._group

    @property
    def pipeline(self) -> Pipeline:
        """Of the bound model, if its buckets are exchanged in stages."""
        size = self.group.size()
        if self._pipeline is None:
            raise RuntimeError(
                f'{type(self).__name__} averages over {size} ranks in one '
                'collective, without a pipeline'
            )
        return self._pipeline

    @property
    def sent_bytes(self) -> int:
        """What this rank has sent so far, in bytes; see ``Traffic``."""
        return self._sent.rank

    @property
    def node_sent_bytes(self) -> int:
        """What its machine has sent to other machines so far, in bytes."""
        return self._sent.node

    @property
    def is_node_aware(self) -> bool:
        """Whether the bound exchange sums within the machines first."""
        return not self._share.is_whole

    def probes(self, size: int, device: torch.device) -> list[Collective]:
        """Return small collectives that the backend has to be able to run."""
        return [all_reduce(torch.zeros(1, dtype=torch.float32, device=device))]

    def share_in(
        self, topology: Topology, device_type: str, rank: int = 0
    ) -> Share:
        """Return what a rank would average on a device in a topology."""
        # The groups of nodes need all ranks of the world.
        by_nodes = topology.is_grid and not self._is_part
        by_nodes = by_nodes and self._wants_nodes(device_type)
        return Share.of(topology, rank, by_nodes)

    def step_bytes(
        self, bucket_dtype: torch.dtype | None = None
    ) -> Sent | None:
        """Return what a step of the bound model sends, without running it.

        As if all gradients were in one bucket for each dtype: the lengths of
        buckets make a difference of some padding. None if the method does
        not say.

        Args:
            bucket_dtype: What a wrapper casts wider buckets to.
        """
        rank = self.group.rank()
        traffic = self.traffic(
            list(self._parameters.values()), self._share, bucket_dtype
        )
        if traffic is None:
            return None
        return sum_sent(traffic, self.topology, rank)

    def traffic(
        self,
        parameters: Sequence[torch.Tensor],
        share: Share,
        bucket_dtype: torch.dtype | None = None,
    ) -> list[Traffic] | None:
        """Return what the collectives of a step move, in their order.

        Args:
            parameters: Whose gradients are exchanged; of any device, 'meta'
                too.
            share: That of any rank; see :meth:`share_in`.
            bucket_dtype: See :meth:`step_bytes`.
        """
        return None

    def on_train_start(self, training: Training) -> None:
        """Say which ranks share a machine, and what that means."""
        size = self.topology.size
        line = f'Gradients are exchanged between {self.topology}'
        if self.topology.source:
            line += f' (as {self.topology.source} has it)'
        if self.is_node_aware:
            line += ', which sum up their own first'
        elif (
            self._wants_nodes(self._device_type)
            and 1 < len(self.topology.nodes) < size
        ):
            line += (
                '; nothing is summed within the nodes first, which takes '
                'several ranks on each, as many everywhere, and all ranks of '
                'the training'
            )
        training.logger.info(line)

    def close(self) -> None:
        """End threads and process groups, after the last backward pass.

        The state stays. Also done when the model and the hook are collected.
        """
        if self._pipeline is not None:
            self._pipeline.close()

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles are not bound."""
        return self.__dict__ | {
            '_group': None,
            '_pipeline': None,
            '_parameters': {},
            '_names': {},
            'topology': _UNBOUND,
            '_is_part': False,
            '_share': Share(),
        }

    def _prepare(self, ddp: DistributedDataParallel) -> None:
        """Take what else the method needs of a model that is bound."""
        return

    def _cut(
        self, buffer: torch.Tensor, parameters: list[torch.Tensor]
    ) -> list[tuple[torch.Tensor, list[torch.Tensor]]]:
        """Return what is exchanged as if it were a bucket, in its order.

        So a part can travel while the next one is computed. An accelerator
        computes in no time, and more parts are more launches there.
        """
        if self._part_numel is None or buffer.is_cuda:
            return [(buffer, parameters)]
        return cut(buffer, parameters, self._part_numel)

    @abstractmethod
    def _exchange(
        self, buffer: torch.Tensor, parameters: list[torch.Tensor]
    ) -> Iterator[Collective]:
        """Yield the collectives of a bucket, or of a part of one.

        Args:
            buffer: Shape (numel,); the average is left in it.
            parameters: Whose gradients it has, in their order.
        """

    @property
    def _sent(self) -> Sent:
        return self._pipeline.sent if self._pipeline else Sent()

    def _wants_nodes(self, device_type: str) -> bool:
        if self._node_aware is None:
            return device_type in self._node_aware_on
        return self._node_aware
