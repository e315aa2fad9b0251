"""The benchmark's command line, and runs of it."""

import json
import os

import pytest

from tests.test_benchmark.test_launching import needs_links

from .scripts import REPO, TOOLS, load_tool, run

TOOL = load_tool('benchmark_comm_hooks')
DEMO = next((REPO / 'configs/internvit').glob('*shapes*'))
PARAMETERS = 24 * (200 * 200 + 200)


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch):
    monkeypatch.delenv('RANK', raising=False)


def test_defaults():
    args = TOOL.parse_args([])
    assert args.ranks == 2
    assert not args.rate
    assert [choice.label for choice in args.hooks] == [
        'none',
        'fp16',
        'bf16',
        'fp16_scaled',
        'int8',
        'powersgd(matrix_approximation_rank=4)',
    ]
    assert args.cfg is None
    assert not TOOL.is_rank(args)


@needs_links
def test_rates_alone_are_two_nodes():
    args = TOOL.parse_args(['--rate', '200mbit', '1gbit'])
    assert (args.nodes, args.ranks_per_node, args.ranks) == (2, 1, None)
    assert [rate.name for rate in args.rate] == ['200mbit', '1gbit']
    args = TOOL.parse_args('--rate 1gbit --nodes 3'.split())
    assert (args.nodes, args.ranks_per_node) == (3, 1)


def test_config():
    args = TOOL.parse_args(['--config', str(DEMO)])
    assert args.cfg.model.type == 'InternViTSegmentor'


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        ('--hooks int9', "unknown ddp_comm_hook 'int9'"),
        ('--hooks fp16 fp16', 'fp16 is named twice'),
        ('--rate 200mb', "'200mb' is no rate"),
        ('--nodes 2', 'need --rate'),
        ('--ranks-per-node 2', 'need --rate'),
        ('--rate 1gbit --ranks 2', 'take --nodes and --ranks-per-node'),
        ('--rounds 0', '--rounds 0 must be at least 1'),
        ('--params nan', '--params nan must be at least 1'),
        ('--error-steps 3', '--error-steps 3 must be even'),
        ('--config absent.py', 'absent.py'),
        ('--json absent/file.json', 'there is no such folder'),
        ('--chart absent/file.png', 'there is no such folder'),
        ('--chart file.bmq', 'must end with one of'),
    ],
)
def test_bad_command_line(options, message, capsys):
    with pytest.raises(SystemExit) as error:
        TOOL.parse_args(options.split())
    assert error.value.code == 2
    assert message in capsys.readouterr().err


def test_emulated_links_without_root(monkeypatch, capsys):
    monkeypatch.setattr(os, 'geteuid', lambda: 1000)
    with pytest.raises(SystemExit):
        TOOL.parse_args(['--rate', '1gbit'])
    assert 'emulated links need root' in capsys.readouterr().err


def test_config_and_layers(capsys):
    with pytest.raises(SystemExit):
        TOOL.parse_args(['--config', str(DEMO), '--params', '1000'])
    assert 'take one of --config and --params' in capsys.readouterr().err


@pytest.mark.parametrize(
    'launched', [['--launcher', 'slurm'], ['--hooks', 'fp16']]
)
def test_real_machines_are_what_they_are(launched, monkeypatch, capsys):
    if '--launcher' not in launched:
        monkeypatch.setenv('RANK', '0')
    assert TOOL.is_rank(TOOL.parse_args(launched))
    for option in ('--rate 1gbit', '--nodes 2', '--ranks 2'):
        with pytest.raises(SystemExit):
            TOOL.parse_args([*launched, *option.split()])
        assert 'network are what they are' in capsys.readouterr().err


def test_more_ranks_than_gpus(monkeypatch, capsys):
    monkeypatch.setattr(TOOL.torch.cuda, 'device_count', lambda: 1)
    with pytest.raises(SystemExit):
        TOOL.parse_args(['--ranks', '2'])
    assert '--ranks 2, but there are 1 GPUs' in capsys.readouterr().err


def _benchmark(cwd, *options, program=('python',), **kwargs):
    result = run(
        *program,
        TOOLS / 'benchmark_comm_hooks.py',
        *options,
        '--json',
        'report.json',
        cwd=cwd,
        **kwargs,
    )
    return result.stdout, json.loads((cwd / 'report.json').read_text())


def _layers(*hooks):
    return [
        *('--params', PARAMETERS, '--rounds', 3, '--error-steps', 2),
        *('--hooks', *hooks),
    ]


@pytest.mark.e2e
def test_over_loopback(tmp_path):
    printed, report = _benchmark(
        tmp_path, *_layers('fp16', 'int8'), '--chart', 'chart.png'
    )
    assert [cost['hook'] for cost in report['costs']] == [
        'none',
        'fp16',
        'int8',
    ]
    assert report['costs'][0]['rank_bytes'] == 4 * PARAMETERS
    assert report['costs'][1]['rank_bytes'] == 2 * PARAMETERS
    assert report['links'][0]['link'] == 'within one node'
    assert '1 node of 2 ranks, ' in printed
    assert 'within one node: step without exchange' in printed
    assert (tmp_path / 'chart.png').stat().st_size > 1000


@pytest.mark.e2e
@needs_links
@pytest.mark.parametrize(
    ('nodes', 'ranks_per_node', 'rates', 'factor'),
    [(2, 1, ['1gbit', '0.5gbit'], 1.0), (2, 2, ['1gbit'], 1.5)],
)
def test_counts_agree_with_the_kernel(
    nodes, ranks_per_node, rates, factor, tmp_path
):
    _, report = _benchmark(
        tmp_path,
        *_layers("dict(type='fp16', node_aware=False)"),
        *('--rate', *rates),
        *('--nodes', nodes, '--ranks-per-node', ranks_per_node),
        timeout_s=280,
    )
    assert report['setting']['nodes'] == nodes
    assert report['setting']['ranks'] == nodes * ranks_per_node
    measured = [link['rate_bytes_per_s'] for link in report['links']]
    assert measured == [1e9 / 8, 0.5e9 / 8][: len(rates)]
    for itemsize, cost in zip((4, 2), report['costs'], strict=True):
        # One edge of the ring leaves a node.
        sent = factor * itemsize * PARAMETERS
        assert cost['rank_bytes'] == cost['node_bytes'] == sent
    for link in report['links']:
        # Slower is no fault of the limit; what it lets through at once is
        # 1/128 of the message.
        share = link['reached_bytes_per_s'] / link['rate_bytes_per_s']
        assert 0 < share < 1 + 1 / 128
        for cost, timing in zip(report['costs'], link['timings'], strict=True):
            assert 1 < timing['kernel_bytes'] / cost['node_bytes'] < 1.03, (
                timing['hook']
            )
            assert timing['net_ratio'] > 0


@pytest.mark.e2e
def test_model_of_a_config_under_torchrun(tmp_path):
    printed, report = _benchmark(
        tmp_path,
        *('--config', DEMO, '--rounds', 2, '--error-steps', 2),
        *('--hooks', 'fp16_scaled'),
        program=('torchrun', '--nproc-per-node', 2),
    )
    assert report['setting']['workload'].startswith('InternViTSegmentor of')
    assert report['costs'][1]['last_error'] < 2**-10
    assert '1 node of 2 ranks, ' in printed


@pytest.mark.e2e
def test_failed_rank_shows_why(tmp_path):
    # Read by each rank anew: the second one finds another file.
    config = tmp_path / 'config.py'
    config.write_text(
        'import os\n'
        f'_base_ = {str(DEMO)!r}\n'
        "if os.environ.get('RANK') == '1':\n"
        "    raise ValueError('only here')\n"
    )
    result = run(
        *('python', TOOLS / 'benchmark_comm_hooks.py', '--config', config),
        cwd=tmp_path,
        check=False,
    )
    assert result.returncode == 1
    assert 'only here' in result.stdout
    assert 'rank 1 failed with exit code' in result.stdout
