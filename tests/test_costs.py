"""Bytes against messages that are passed around; seconds in the limits."""

import itertools

import pytest

from mmcv_custom import costs

SIZES = (2, 3, 4, 8)
ROUNDING = 1e-12


def pass_around(values, rounds, is_sum):
    """Let each rank hand a part to the next one, again and again.

    Args:
        values: By rank, a list of one number for each part.
        rounds: The part that rank i sends in each of them is i - round.
        is_sum: Whether what has come is added, or replaces.

    Returns:
        How many parts each rank has sent.
    """
    size, sent = len(values), [0] * len(values)
    for number in rounds:
        messages = []
        for rank in range(size):
            part = (rank - number) % size
            messages.append(((rank + 1) % size, part, values[rank][part]))
            sent[rank] += 1
        for receiver, part, value in messages:
            values[receiver][part] = value + is_sum * values[receiver][part]
    return sent


@pytest.mark.parametrize('size', SIZES)
def test_ring_all_reduce(size):
    values = [[10**rank] * size for rank in range(size)]
    added = pass_around(values, range(size - 1), is_sum=True)
    told = pass_around(values, range(-1, size - 2), is_sum=False)
    assert values == [[int('1' * size)] * size] * size
    part_bytes = 28
    for sent in map(sum, zip(added, told, strict=True)):
        assert sent == costs.messages('all_reduce', size)
        nbytes = part_bytes * size
        assert costs.all_reduce_bytes(nbytes, size) == sent * part_bytes
    assert costs.all_reduce_bytes(1, size) == 2 - (size == 2)


@pytest.mark.parametrize('size', SIZES)
def test_ring_all_gather(size):
    values = [
        [1 + rank if part == rank else 0 for part in range(size)]
        for rank in range(size)
    ]
    sent = pass_around(values, range(size - 1), is_sum=False)
    assert values == [[*range(1, 1 + size)]] * size
    assert {*sent} == {costs.messages('all_gather', size)}
    assert costs.all_gather_bytes(28, size) == 28 * sent[0]


@pytest.mark.parametrize('size', SIZES)
def test_all_to_all_by_pairs(size):
    sent = [sum(other != rank for other in range(size)) for rank in (0, 1)]
    assert sent == [costs.messages('all_to_all', size)] * 2
    assert costs.all_to_all_bytes(28 * size, size) == 28 * sent[0]


@pytest.mark.parametrize(
    ('nodes', 'edges'),
    [
        ([(0, 1), (2, 3)], [1, 1]),
        ([(0, 2), (1, 3)], [2, 2]),
        ([(0, 1, 2), (3,)], [1, 1]),
        ([(0, 1, 2, 3)], [0]),
    ],
)
def test_bytes_that_leave_a_node(nodes, edges):
    for node, leaving in zip(nodes, edges, strict=True):
        assert costs.ring_node_bytes(7, node, 4) == 7 * leaving
        # 9 bytes of each are 3 for each of the other ranks.
        pairs = [(a, b) for a in node for b in range(4) if b not in node]
        assert costs.pairs_node_bytes(9, node, 4) == 3 * len(pairs)


def test_heads_of_the_6b_model():
    nbytes = costs.all_reduce_bytes(int(4 * 319.9e6), 8)
    assert round(nbytes / 1e9, 2) == 2.24
    assert round(costs.transfer_s(0, 0.0, nbytes, 25e9 / 8), 2) == 0.72


def test_messages_take_their_time_besides_their_bytes():
    assert costs.transfer_s(14, 0.5, 100, 50.0) == 14 * 0.5 + 2.0


@pytest.mark.parametrize(
    ('compute_s', 'node_bytes', 'bytes_per_s', 'floor'),
    [
        (0.0, 1000, 10000.0, 1.0),  # 0.03 + 0.1: all is hidden
        (0.25, 1000, 10000.0, 1.25),
        (0.25, 50000, 10000.0, 5.03),
        (0.25, None, 10000.0, 1.25),
        (0.25, 50000, None, 1.25),
    ],
)
def test_floor(compute_s, node_bytes, bytes_per_s, floor):
    found = costs.floor_s(1.0, 0.03, compute_s, node_bytes, bytes_per_s)
    assert found == floor


def replay(no_op_s, first_s, around_s, wire_s, buckets):
    """Return when the last of some buckets is through, one by one.

    They come at equal distances. Each takes its part of ``around_s`` before
    it goes on the link, if it is the first, or comes last.
    """
    distance = (no_op_s - first_s) / max(1, buckets - 1)
    free = 0.0
    for number in range(buckets):
        ready = first_s + number * distance + around_s / buckets
        free = max(free, ready) + wire_s / buckets
    return free


@pytest.mark.parametrize('buckets', [1, 2, 5, 40])
@pytest.mark.parametrize('wire_s', [0.0, 0.1, 0.7, 1.0, 5.0])
@pytest.mark.parametrize('around_s', [0.0, 0.5])
def test_overlapped_step_is_that_of_bucket_after_bucket(
    around_s, wire_s, buckets
):
    no_op_s, first_s = 1.0, 0.25 if buckets > 1 else 1.0
    step_s = costs.overlapped_step_s(
        no_op_s, first_s, around_s, no_op_s, wire_s, 1 / buckets
    )
    expected = replay(no_op_s, first_s, around_s, wire_s, buckets)
    assert step_s == pytest.approx(max(no_op_s, expected))


def test_steps_are_ordered():
    grid = itertools.product(
        (0.1, 0.5, 1.0),  # first bucket
        (0.0, 0.2),  # computing
        (0.0, 0.3),  # what else it takes without a link
        (0.0, 0.4, 3.0),  # link
        (1.0, 0.125),  # a bucket
    )
    for first_s, compute_s, more_s, wire_s, share in grid:
        local_s = compute_s + more_s
        floor = costs.floor_s(1.0, first_s, compute_s, wire_s, 1.0)
        likely = costs.overlapped_step_s(
            1.0, first_s, compute_s, 1.0 + local_s, wire_s, share
        )
        serial = costs.serial_step_s(1.0, first_s, local_s, wire_s, share)
        assert floor < likely + ROUNDING
        assert likely < serial + ROUNDING
        # Whatever it is like, the link cannot cost more than its own time.
        assert serial < 1.0 + local_s + wire_s + ROUNDING


@pytest.mark.parametrize('size', SIZES)
@pytest.mark.parametrize('operation', ['all_reduce', 'all_gather'])
def test_seconds_of_a_ring_are_those_of_its_messages(operation, size):
    """Each rank sends on, in its turn, what it has got."""
    latency_s, bytes_per_s, nbytes = 0.5, 50.0, 28 * size
    formula, part = {
        'all_reduce': (costs.all_reduce_bytes, nbytes / size),
        'all_gather': (costs.all_gather_bytes, nbytes),
    }[operation]
    done = [0.0] * size
    for _ in range(costs.messages(operation, size)):
        sent = [start + latency_s + part / bytes_per_s for start in done]
        done = [max(sent[rank], sent[rank - 1]) for rank in range(size)]
    assert max(done) == pytest.approx(
        costs.transfer_s(
            costs.messages(operation, size),
            latency_s,
            formula(nbytes, size),
            bytes_per_s,
        )
    )


def replay_serially(no_op_s, first_s, local_s, wire_s, buckets):
    """Return when the last bucket is through if all wait for each other.

    What a bucket needs of the ranks delays all that comes after it, and the
    link begins with a bucket when the one before has been through.
    """
    distance = (no_op_s - first_s) / max(1, buckets - 1)
    free = delay = 0.0
    for number in range(buckets):
        delay += local_s / buckets
        free = max(free, first_s + number * distance + delay)
        free += wire_s / buckets
    return free


@pytest.mark.parametrize('buckets', [1, 2, 5, 40])
@pytest.mark.parametrize('wire_s', [0.0, 0.1, 0.7, 1.0, 5.0])
@pytest.mark.parametrize('local_s', [0.0, 0.5, 2.0])
def test_serial_step_is_an_upper_bound(local_s, wire_s, buckets):
    no_op_s, first_s = 1.0, 0.25 if buckets > 1 else 1.0
    shape = no_op_s, first_s, local_s, wire_s
    bound = costs.serial_step_s(*shape, 1 / buckets)
    found = replay_serially(*shape, buckets)
    assert found <= bound + ROUNDING
    # One bucket's part of what the ranks do may go on beside the link.
    assert bound <= found + local_s + ROUNDING
    if buckets == 1:
        assert found == pytest.approx(bound)
