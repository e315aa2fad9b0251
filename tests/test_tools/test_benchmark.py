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
        ('--hooks auto --rate 1gbit 2gbit', 'give one --rate at most'),
        (
            '--hooks auto --predict nodes=2 ranks_per_node=1 rate=1gbit',
            'and no --predict',
        ),
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
    if '--launcher' in launched:
        for name in 'NODELIST PROCID LOCALID NTASKS'.split():
            monkeypatch.setenv(f'SLURM_{name}', '0')
    else:
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
        f'_base_ = {str(DEMO)!r}\n'
        "if '{{$RANK:0}}' == '1':\n"
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


CLUSTER = 'nodes=8 ranks_per_node=8 rate=25gbit'


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        ('--predict nodes=8', '--predict: ranks_per_node is missing'),
        (f'--predict {CLUSTER} --ranks 1', 'needs a run of --ranks 2 or more'),
        ('--step-ms 900', '--step-ms is for --predict: name a cluster'),
        (f'--predict {CLUSTER} --step-ms 900', 'needs a model: --config or'),
        (f'--predict {CLUSTER} --step-ms 0', '--step-ms 0.0 must be at least'),
        (
            f'--predict {CLUSTER} --step-ms 900 --params 1e6 --ranks 4',
            'with --step-ms nothing runs',
        ),
    ],
)
def test_bad_prediction(options, message, capsys):
    with pytest.raises(SystemExit) as error:
        TOOL.parse_args(options.split())
    assert error.value.code == 2
    assert message in capsys.readouterr().err


def test_prediction_without_a_run_has_no_launcher(monkeypatch, capsys):
    monkeypatch.setenv('RANK', '0')
    options = f'--predict {CLUSTER} --step-ms 900 --params 1e6'
    with pytest.raises(SystemExit):
        TOOL.parse_args(options.split())
    assert 'nothing runs: use no launcher' in capsys.readouterr().err


@pytest.mark.parametrize(
    'model', [['--config', str(DEMO)], ['--params', str(PARAMETERS)]]
)
def test_prediction_without_a_run(model, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    options = f'--predict {CLUSTER} --predict {CLUSTER} --step-ms 900'
    files = '--json report.json --chart chart.png'
    monkeypatch.setattr(
        'sys.argv', ['benchmark', *options.split(), *model, *files.split()]
    )
    TOOL.main()
    printed = capsys.readouterr().out
    assert 'step without exchange 900 ms, as given' in printed
    assert printed.count('predicted for 8 nodes of 8 ranks, 25gbit') == 2
    assert 'Nothing was measured' in printed
    report = json.loads((tmp_path / 'report.json').read_text())
    first, second = report['prediction']['clusters']
    assert first == second
    none = first['forecasts'][0]
    sent = 2 * 63 / 64 * report['setting']['gradient_bytes']
    assert none['node_bytes'] == pytest.approx(sent)
    assert 0.9 <= none['low_s'] <= none['step_s'] < none['high_s']
    assert (tmp_path / 'chart.png').stat().st_size > 1000


@pytest.mark.e2e
def test_prediction_from_loopback(tmp_path):
    printed, report = _benchmark(
        tmp_path,
        *_layers('fp16', 'int8'),
        *('--predict', *CLUSTER.split()),
        *('--chart', 'chart.png'),
    )
    prediction = report['prediction']
    assert prediction['checks'] == prediction['left_out'] == []
    (cluster,) = prediction['clusters']
    hooks = [forecast['hook'] for forecast in cluster['forecasts']]
    assert hooks == ['none', 'fp16', 'int8']
    (link,) = report['links']
    basis = prediction['bases']['likely']
    assert basis['no_op_s'] == link['no_op_s']['median']
    assert basis['buckets'] == report['buckets']
    for forecast, timing in zip(
        cluster['forecasts'], link['timings'], strict=True
    ):
        known = basis['hooks'][forecast['hook']]
        assert known['exposed_s'] == timing['exposed_s']
        # So much more is sent, by so many more ranks, that it takes longer.
        assert forecast['step_s'] > timing['step_s']['median']
        assert forecast['low_s'] <= forecast['step_s'] <= forecast['high_s']
    assert 'predicted for 8 nodes of 8 ranks, 25gbit per node' in printed


@pytest.mark.e2e
@needs_links
def test_prediction_of_emulated_links(tmp_path):
    printed, report = _benchmark(
        tmp_path,
        *_layers('int8'),
        *('--rate', '100mbit', '--predict', *CLUSTER.split()),
        timeout_s=280,
    )
    free, limited = report['links']
    assert (free['link'], free['rate_bytes_per_s']) == ('no limit', None)
    assert free['reached_bytes_per_s'] > 2 * limited['reached_bytes_per_s']
    (check,) = report['prediction']['checks']
    assert check['link'] == limited['link'] == '100mbit per node'
    hooks = {}
    for timing in limited['timings']:
        hooks[timing['hook']] = timing['step_s']['median']
    assert [*check['ratios']] == [*hooks] == ['none', 'int8']
    # What the link needs at least, with all that can come on top.
    sent = 4 * PARAMETERS / (100e6 / 8)
    assert check['ratios']['none'] * hooks['none'] > sent
    assert '100mbit per node: steps off by at most ' in printed


@needs_links
def test_repeated_options_add_up():
    args = TOOL.parse_args(
        '--hooks fp16 --rate 1gbit --hooks int8 --rate 2gbit'.split()
    )
    assert [choice.label for choice in args.hooks] == ['none', 'fp16', 'int8']
    assert [rate.name for rate in args.rate] == ['1gbit', '2gbit']


def test_slurm_that_has_not_started_it(monkeypatch, capsys):
    for name in 'NODELIST PROCID LOCALID'.split():
        monkeypatch.setenv(f'SLURM_{name}', '0')
    monkeypatch.delenv('SLURM_NTASKS', raising=False)
    with pytest.raises(SystemExit):
        TOOL.parse_args(['--launcher', 'slurm'])
    error = capsys.readouterr().err
    assert "'slurm', but SLURM_NTASKS is not set: start each" in error


def test_config_that_cannot_be_read(tmp_path, capsys):
    config = tmp_path / 'config.py'
    for text, message in (
        ('x = (', "'(' was never closed"),
        ("custom_imports = dict(imports=['absent'])", 'Failed to import'),
    ):
        config.write_text(text)
        with pytest.raises(SystemExit) as error:
            TOOL.parse_args(['--config', str(config)])
        assert error.value.code == 2
        assert f'error: {config}: {message}' in capsys.readouterr().err


def test_files_are_written_before_the_table(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = f'--predict {CLUSTER} --step-ms 900 --params 1e6 --json a.json'
    monkeypatch.setattr('sys.argv', ['benchmark', *options.split()])

    def fail():
        raise BrokenPipeError

    monkeypatch.setattr(TOOL, 'make_console', fail)
    with pytest.raises(BrokenPipeError):
        TOOL.main()
    assert json.loads((tmp_path / 'a.json').read_text())['prediction']


@pytest.mark.e2e
def test_reader_of_the_table_that_goes_away(tmp_path):
    program = ['bash', '-c', '"$@" | head -1', 'bash', 'python']
    printed, report = _benchmark(tmp_path, *_layers('fp16'), program=program)
    assert 'measuring none, fp16' in printed
    assert [cost['hook'] for cost in report['costs']] == ['none', 'fp16']
