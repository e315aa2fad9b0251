"""A report with figures that are easy to check."""

from mmcv_custom.benchmark.results import (
    ClusterForecast,
    Cost,
    Forecast,
    LinkCheck,
    LinkResult,
    Prediction,
    Report,
    Spread,
    Timing,
)

LONG = 'powersgd(matrix_approximation_rank=4, levels=[b])'


def make_report(rates=('200mbit per node',), nodes=2):
    """Return a report of plain DDP and of a hook with a long name."""
    several = nodes > 1
    costs = [
        Cost('none', None, 8e6, 12e6 if several else 0, 3e-8, 2e-8, 0, 0.0),
        Cost(LONG, {'type': 'powersgd'}, 1e6, None, 0.5, 0.25, 16000000, 0.02),
    ]
    timings = [
        Timing(
            'none',
            Spread(0.5, 0.4, 0.6, 0.3, 0.7),
            exposed_s=0.4,
            hidden_s=0.06,
            kernel_bytes=12.1e6 if several else None,
            speed=1.0,
            floor_s=0.45,
            ratio=0.5 / 0.45,
            net_ratio=1.05 if several else None,
        ),
        Timing(
            LONG,
            Spread(0.2, 0.2, 0.2, 0.2, 0.2),
            exposed_s=0.1,
            hidden_s=0.03,
            kernel_bytes=1.6e6 if several else None,
            speed=2.5,
            floor_s=0.125,
            ratio=1.6,
            net_ratio=1.55 if several else None,
        ),
    ]
    no_op = Spread(0.1, 0.1, 0.1, 0.1, 0.1)
    return Report(
        setting={
            'torch': '2.0',
            'backend': 'gloo',
            'ranks': 4,
            'nodes': nodes,
            'cores': 2,
            'workload': 'some layers',
            'parameters': 2000000,
            'gradient_bytes': 8000000,
            'rounds': 5,
            'error_steps': 4,
        },
        copy_s=0.001,
        guard_s=4e-6,
        buckets=3,
        bucket_share=0.5,
        costs=costs,
        links=[
            LinkResult(
                rate,
                25e6 if several else None,
                24e6 if several else None,
                no_op,
                0.03,
                timings,
            )
            for rate in rates
        ],
    )


def make_prediction():
    """Return one of a cluster, with checks of two links."""
    forecasts = [
        Forecast('none', 14000000, 14000000, 2.0, 1.5, 2.5, 1.9, 0.07, 1.0),
        Forecast(LONG, 1000000, 1000000, 0.25, 0.125, 0.5, 0.15, 0.02, 8.0),
    ]
    ratios = {'none': 0.99, LONG: 0.8}
    return Prediction(
        bases={},
        gradient_bytes=8000000,
        clusters=[ClusterForecast('a cluster', 25e6, 0.1, 0.03, forecasts)],
        checks=[
            LinkCheck('slow', 0.95, ratios, 0.8, True, []),
            LinkCheck('fast', 1.05, {**ratios, LONG: 1.5}, 1.5, False, [LONG]),
        ],
        left_out=['other'],
        notes='What is assumed.',
    )
