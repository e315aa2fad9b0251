"""Time a training step of each hook over slow links, against its floor.

    python tools/benchmark_links.py --rates 200mbit 1gbit

Needs root, `ip` and `tc`: two processes, each in a network namespace, are
joined by a veth pair with a token-bucket filter at both ends.

The model has 24 layers of 1024 x 1024 (25.2 M parameters). Every round times
one step (forward and backward) of each method in turn; a step lasts until the
slower rank has its gradients. All figures are medians over the rounds.

    floor = max(no-op step, its time to the first bucket + sent / rate)

`sent` is what the compressor counts, and what a ring sends where there is
none; `veth` is what the kernel counts. The rate is the nominal one, although
headers take a part of it; `net ratio` takes what a large all-reduce reaches.

powersgd's own compute is added to its floor: the two processes leave it no
core of its own. To measure it, a compressor's stages run one by one within a
normal step, and the clock stops while a collective is under way. It is
compared with the three products of each matrix and with one `copy_` of all.
"""

import argparse
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mmcv_custom.contract import adapt_hook
from mmcv_custom.engine.ddp_wrapper import attach_comm_hook

RANK = 4
POWERSGD = {'matrix_approximation_rank': RANK, 'start_powerSGD_iter': 2}
METHODS = {
    'none': None,
    'fp16': 'fp16',
    'fp16_scaled': 'fp16_scaled',
    'int8': 'int8',
    'powersgd': {'type': 'powersgd', **POWERSGD},
}
NO_OP = 'no-op'
WORLD_SIZE = 2
LAYERS, WIDTH = 24, 1024
DEVICE = 'veth0'
TX_BYTES = Path('/sys/class/net', DEVICE, 'statistics/tx_bytes')
# Small, as a step may send that much at once, whatever the rate; but not less
# than the kernel's largest packets, which it would have to cut.
BURST = '128kb'
UNITS = {'mbit': 1e6, 'gbit': 1e9}
WARMUP_STEPS = 4  # until all methods compress


def parse_args():
    raw = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    add = parser.add_argument
    add('--rates', nargs='+', default=['200mbit', '1gbit'])
    add('--rounds', type=int, default=15)
    add('--batch', type=int, default=32, help='of a rank')
    add('--timeout', type=float, default=1800, help='seconds for everything')
    add('--rank', type=int, help=argparse.SUPPRESS)
    add('--store', help=argparse.SUPPRESS)
    return parser.parse_args()


def launch(args):
    """Run a worker at each end of a link; returns the exit code."""
    if os.geteuid() != 0:
        sys.exit('benchmark_links.py needs root, for network namespaces')
    if not (shutil.which('ip') and shutil.which('tc')):
        sys.exit('benchmark_links.py needs `ip` and `tc` (iproute2)')
    # A default SIGTERM would leave the namespaces behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    names = [f'links{os.getpid()}-{rank}' for rank in range(WORLD_SIZE)]
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        try:
            for name in names:
                run(f'ip netns add {name}')
                stack.callback(run, f'ip netns del {name}')
            join(*names)
        except subprocess.CalledProcessError as error:
            sys.exit(f'no link: {" ".join(error.cmd)}: {error.stderr}')
        workers = []
        for rank, name in enumerate(names):
            # `ip netns exec` becomes the worker: one process to end.
            start = f'ip netns exec {name} {sys.executable}'.split()
            options = f'--rank {rank} --store {folder}/store'.split()
            worker = subprocess.Popen([*start, *sys.argv, *options])
            stack.callback(worker.wait)
            stack.callback(worker.kill)  # nothing, if it has ended
            workers.append(worker)
        return wait_for(workers, args.timeout)


def join(first, second):
    peer = f'type veth peer name {DEVICE} netns {second}'
    run(f'ip link add {DEVICE} netns {first} {peer}')
    for number, name in enumerate((first, second), 1):
        run(f'ip -n {name} addr add 10.9.0.{number}/30 dev {DEVICE}')
        run(f'ip -n {name} link set {DEVICE} up')


def run(command):
    subprocess.run(command.split(), check=True, capture_output=True, text=True)


def wait_for(workers, timeout):
    deadline = time.monotonic() + timeout
    codes = [None]
    while None in codes and not any(codes):
        if time.monotonic() > deadline:
            sys.exit(f'gave up after {timeout:.0f} s')
        time.sleep(0.2)
        codes = [worker.poll() for worker in workers]
    return int(any(codes))


class Clock:
    """Stands in for a compressor's exchange, and times what is no wire."""

    sent_bytes = 0

    def __init__(self, pipeline):
        self.group, self.seconds = pipeline.group, 0.0
        self.world_size, self.rank = pipeline.world_size, pipeline.rank

    def start(self, stages, buffer):
        while True:
            start = time.perf_counter()
            collective = next(stages, None)
            self.seconds += time.perf_counter() - start
            if collective is None:
                return buffer  # the adapter makes a future of it
            for work in collective.issue(self.group):
                work.wait()


class Method:
    def __init__(self, name, batch):
        torch.manual_seed(0)
        layers = [nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
        for layer in layers:  # with the default the gradients would vanish
            nn.init.kaiming_normal_(layer.weight, nonlinearity='relu')
        pairs = [nn.Sequential(layer, nn.ReLU()) for layer in layers]
        self.ddp = DistributedDataParallel(nn.Sequential(*pairs))
        comm_hook = attach_comm_hook(self.ddp, METHODS.get(name))
        self.compressor = comm_hook and comm_hook.instance
        if name == NO_OP:
            self.ddp.register_comm_hook(None, adapt_hook(self.do_nothing))
        numel = sum(p.numel() for p in self.ddp.parameters())
        itemsize = {NO_OP: 0, 'fp16': 2}.get(name, 4)
        self.ring_bytes = 2 * (WORLD_SIZE - 1) * numel * itemsize / WORLD_SIZE
        torch.manual_seed(dist.get_rank())
        self.inputs = torch.randn(batch, WIDTH)

    def do_nothing(self, state, bucket):
        self.first_bucket = self.first_bucket or time.perf_counter()
        return bucket.buffer()

    def step(self):
        """Return seconds, those to the first bucket, sent and veth bytes."""
        self.ddp.zero_grad()
        self.first_bucket = 0.0
        before = self.sent_bytes(), int(TX_BYTES.read_text())
        dist.barrier()
        start = time.perf_counter()
        self.ddp(self.inputs).square().mean().backward()
        times = time.perf_counter() - start, self.first_bucket - start
        times = torch.tensor(times, dtype=torch.float64)
        dist.all_reduce(times, dist.ReduceOp.MAX)  # the slower rank's
        sent = (self.sent_bytes() or self.ring_bytes) - before[0]
        return *times.tolist(), sent, int(TX_BYTES.read_text()) - before[1]

    def sent_bytes(self):
        return self.compressor.sent_bytes if self.compressor else 0

    def compute_seconds(self):
        """Of the compressor, in one step."""
        pipeline = self.compressor._pipeline
        self.compressor._pipeline = clock = Clock(pipeline)
        self.step()
        self.compressor._pipeline = pipeline
        return clock.seconds


def multiply(matrices, step):
    """Compute powersgd's three products of each matrix."""
    vectors = torch.randn(RANK, WIDTH)
    for matrix, result in matrices:
        if step % 2:
            left, right = matrix @ vectors.t(), vectors
        else:
            left, right = vectors.t(), vectors @ matrix
        matrix.addmm_(left, right, alpha=-1)
        torch.mm(left, right, out=result)


def seconds(function, *args):
    dist.barrier()
    start = time.perf_counter()
    function(*args)
    return time.perf_counter() - start


def measure_compute(methods, rounds, report):
    """Report what the compressors cost without any wire.

    Returns:
        The seconds of powersgd.
    """
    names = [name for name in methods if methods[name].compressor]
    matrices = torch.randn(LAYERS, 2, WIDTH, WIDTH)
    rows = []
    for step in range(rounds + 1):
        rows.append([methods[name].compute_seconds() for name in names])
        rows[-1].append(seconds(matrices[:, 1].copy_, matrices[:, 0]))
        rows[-1].append(seconds(multiply, matrices, step))
    *costs, copy, products = medians(rows)
    for name, cost in zip(names, costs, strict=True):
        report(
            f'{name:11} computes {cost * 1e3:4.0f} ms = {cost / copy:.1f} '
            f'copies = {cost / products:.2f} times the products'
        )
    report(f'copy {copy * 1e3:.1f} ms, products {products * 1e3:.1f} ms')
    return costs[names.index('powersgd')]


def medians(rows):
    """Of each column; the first row is to warm up."""
    return [*map(statistics.median, zip(*rows[1:], strict=True))]


def measure_goodput():
    """Bytes per second and direction of a large all-reduce."""
    message = torch.zeros(2**23)
    dist.all_reduce(message)  # uses up the burst
    return message.nbytes / seconds(dist.all_reduce, message)


def measure_steps(methods, rate, own, rounds, report):
    goodput = measure_goodput()
    rows = {name: [] for name in methods}
    for _ in range(rounds + 1):
        for name, method in methods.items():
            rows[name].append(method.step())
    no_op, first_bucket, *_ = medians(rows.pop(NO_OP))
    report(
        f'no-op step {no_op:.3f} s, first bucket at {first_bucket:.3f} s, '
        f'rate reached {goodput / rate:.1%}'
    )
    report('method        step s  sent MB  veth MB  floor s  ratio  net ratio')
    for name, steps in rows.items():
        step, _, sent, kernel = medians(steps)
        line = f'{name:11} {step:8.3f} {sent / 1e6:8.3f} {kernel / 1e6:8.3f}'
        extra = own if name == 'powersgd' else 0
        floor = max(no_op, first_bucket + sent / rate) + extra
        net = max(no_op, first_bucket + sent / goodput) + extra
        report(f'{line} {floor:8.3f} {step / floor:6.3f} {step / net:10.3f}')


def work(args):
    torch.set_num_threads(1)
    os.environ['GLOO_SOCKET_IFNAME'] = DEVICE
    where = {'rank': args.rank, 'world_size': WORLD_SIZE}
    dist.init_process_group('gloo', f'file://{args.store}', **where)
    report = print if args.rank == 0 else lambda *_: None
    methods = {name: Method(name, args.batch) for name in [NO_OP, *METHODS]}
    for method in methods.values():
        for _ in range(WARMUP_STEPS):
            method.step()
    report(f'torch {torch.__version__}, medians of {args.rounds}\nno limit:')
    own = measure_compute(methods, args.rounds, report)
    for text in args.rates:
        report(f'\n{text}:')
        rate = float(text[:-4]) * UNITS[text[-4:]] / 8
        limit = f'tbf rate {text} burst {BURST} latency 400ms'
        dist.barrier()
        run(f'tc qdisc replace dev {DEVICE} root {limit}')
        dist.barrier()
        measure_steps(methods, rate, own, args.rounds, report)
    dist.destroy_process_group()


def main():
    args = parse_args()
    return launch(args) if args.rank is None else work(args)


if __name__ == '__main__':
    sys.exit(main())
