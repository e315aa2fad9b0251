"""What an exchange of gradients costs: bytes, and seconds.

Formulas alone, which know neither tensors nor process groups: what a run
counts, and what a cluster is predicted to need, comes from the same ones.

A ring sends the least that an all-reduce of large messages can (Patarasuk
and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
workstations", J. Parallel Distrib. Comput. 69(2), 2009). Seconds are those
of the latency-bandwidth ("alpha-beta") model: a message takes alpha, whatever
its size, and beta for each byte (Thakur, Rabenseifner and Gropp,
"Optimization of collective communication operations in MPICH", Int. J. High
Perform. Comput. Appl. 19(1), 2005).
"""

import math
from collections.abc import Collection

__all__ = [
    'TCP_SHARE',
    'all_gather_bytes',
    'all_reduce_bytes',
    'all_to_all_bytes',
    'floor_s',
    'messages',
    'overlapped_step_s',
    'pairs_node_bytes',
    'ring_node_bytes',
    'serial_step_s',
    'transfer_s',
]

# What TCP over Ethernet carries of what a link does. A packet of 1500 bytes
# has headers of 20 (IPv4) and 32 (TCP with time stamps), and travels in a
# frame of 14 more: so `tc` counts it. (On a cable it is 1448 / 1538, with
# checksum, preamble and gap.)
TCP_SHARE = 1448 / 1514


def all_reduce_bytes(nbytes: int, size: int) -> int:
    """Return what a rank sends when all sum up a tensor, by a ring.

    Each of n parts goes around twice: n - 1 times to be summed up, and n - 1
    times to be told.

    Args:
        nbytes: Of each rank's tensor.
        size: n, the number of ranks.
    """
    return math.ceil(2 * (size - 1) * nbytes / size)


def all_gather_bytes(nbytes: int, size: int) -> int:
    """Return what a rank sends when each gets all tensors, by a ring.

    Args:
        nbytes: Of each rank's tensor, which travels on n - 1 times.
        size: n, the number of ranks.
    """
    return (size - 1) * nbytes


def all_to_all_bytes(nbytes: int, size: int) -> int:
    """Return what a rank sends when each has a part for each other one.

    Args:
        nbytes: Of all n parts that a rank has, its own among them.
        size: n, the number of ranks.
    """
    return (size - 1) * nbytes // size


def ring_node_bytes(sent: int, node: Collection[int], size: int) -> int:
    """Return what the ranks of a node send to others, in a ring of all.

    Args:
        sent: By a rank, to the next one.
        node: Its ranks.
        size: The number of all ranks.
    """
    return sent * sum((rank + 1) % size not in node for rank in node)


def pairs_node_bytes(sent: int, node: Collection[int], size: int) -> int:
    """Return what the ranks of a node send to others, each to each alike.

    Args:
        sent: By a rank, to all others.
        node: Its ranks.
        size: The number of all ranks.
    """
    return sent * len(node) * (size - len(node)) // (size - 1)


def messages(operation: str, size: int) -> int:
    """Return how many messages of a collective wait for one another.

    Args:
        operation: 'all_reduce', 'all_gather' (rings), or 'all_to_all'.
        size: The number of ranks.
    """
    return (1 + (operation == 'all_reduce')) * (size - 1)


def transfer_s(
    messages: float, latency_s: float, nbytes: float, bytes_per_s: float
) -> float:
    """Return the seconds of messages one after the other.

    Args:
        messages: How many.
        latency_s: Of each; alpha.
        nbytes: Of all together.
        bytes_per_s: What is carried; 1 / beta.
    """
    return messages * latency_s + nbytes / bytes_per_s


def floor_s(
    no_op_s: float,
    first_bucket_s: float,
    compute_s: float,
    node_bytes: float | None,
    bytes_per_s: float | None,
) -> float:
    """Return what a step takes at least, in seconds.

    A rank has to compute its step and what the hook computes, on one core.
    And the link can carry nothing before the first bucket is ready, and has
    to carry all then.

    Args:
        no_op_s: Of a step without exchange.
        first_bucket_s: Of that step, until the first bucket is ready.
        compute_s: Of the hook. 0 where it has a core of its own.
        node_bytes: Sent by a node in a step; None if nobody counts.
        bytes_per_s: The rate of its link; None if it is not known.
    """
    busy = no_op_s + compute_s
    if node_bytes is None or bytes_per_s is None:
        return busy
    return max(busy, first_bucket_s + node_bytes / bytes_per_s)


def overlapped_step_s(
    no_op_s: float,
    first_bucket_s: float,
    around_s: float,
    busy_s: float,
    wire_s: float,
    bucket_share: float,
) -> float:
    """Return what a step takes whose buckets are on their way together.

    The largest of three: what the ranks need if the link were free; what the
    link needs, which waits for the first bucket to come and to be made ready;
    and what comes after the backward pass, whose last bucket is still to be
    exchanged then.

    Args:
        no_op_s: Of a step without exchange.
        first_bucket_s: Of that step, until the first bucket is ready.
        around_s: Of all buckets, what has to happen within a node before or
            after the link carries them.
        busy_s: Of a step with all but the link.
        wire_s: Of all buckets, on the link.
        bucket_share: The part of all bytes that a bucket has.
    """
    return max(
        busy_s,
        first_bucket_s + bucket_share * around_s + wire_s,
        no_op_s + bucket_share * (around_s + wire_s),
    )


def serial_step_s(
    no_op_s: float,
    first_bucket_s: float,
    local_s: float,
    wire_s: float,
    bucket_share: float,
) -> float:
    """Return the same if ranks and link wait for each other.

    Only the backward pass goes on while the link carries buckets.

    Args:
        no_op_s: As above.
        first_bucket_s: As above.
        local_s: What a step with all but the link takes longer than one
            without exchange.
        wire_s: As above.
        bucket_share: As above.
    """
    return local_s + max(
        first_bucket_s + wire_s, no_op_s + bucket_share * wire_s
    )
