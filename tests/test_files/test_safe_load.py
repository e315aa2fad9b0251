"""What a file may ask for, and what it may not."""

import json
import os
import pickle
import re
import zipfile

import numpy as np
import pytest
import torch
from mmengine.config import ConfigDict
from mmengine.logging import HistoryBuffer
from mmengine.runner.checkpoint import CheckpointLoader

from mmcv_custom.files import read_weights, safe_load


class Call:
    """Pickles as a call of a function."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def getattr_chain(path):
    """Runs code with nothing but `getattr` and what torch allows.

    torch lets a file call `_rebuild_from_type_v2`, which calls any function
    that it is given, and `getattr` leads to every function.
    """

    def call(function, argument, kind):
        return Call(
            torch._tensor._rebuild_from_type_v2,
            function,
            kind,
            (argument,),
            None,
        )

    def kind_of(value):
        return Call(getattr, value, '__class__')

    method = Call(getattr, HistoryBuffer, 'mean')
    found = Call(getattr, Call(getattr, method, '__globals__'), 'get')
    builtins = call(found, '__builtins__', kind_of({}))
    evaluate = call(
        Call(getattr, builtins, 'get'),
        'eval',
        kind_of(Call(getattr, [], 'append')),
    )
    return call(evaluate, f'open({path!r}, "w").close()', kind_of(None))


ATTACKS = {
    'posix.system': lambda path: Call(os.system, f'touch {path}'),
    'eval': lambda path: Call(eval, f'open({path!r}, "w")'),
    'getattr': getattr_chain,
}
WAYS = {
    'init_cfg': read_weights,
    'load_from': CheckpointLoader.load_checkpoint,
    'URL': CheckpointLoader.load_checkpoint,
}


@pytest.fixture(params=['safe mode of torch', 'own unpickler'])
def unpickler(request, monkeypatch):
    """Both ways to read, the second as before torch 2.5."""
    if request.param == 'own unpickler':
        monkeypatch.setattr(safe_load, '_CAN_ADMIT', False)
    elif not safe_load._CAN_ADMIT:
        pytest.skip('this torch has no safe_globals')


def as_url(monkeypatch, path):
    """A URL that is downloaded from a file."""

    def download(url, target, *args, **kwargs):
        with open(path, 'rb') as source, open(target, 'wb') as file:
            file.write(source.read())

    monkeypatch.setenv('TORCH_HOME', str(path.parent / 'home'))
    monkeypatch.setattr(torch.hub, 'download_url_to_file', download)
    return f'https://example.org/{path.name}'


@pytest.mark.parametrize('way', sorted(WAYS))
@pytest.mark.parametrize('asked', sorted(ATTACKS))
@pytest.mark.usefixtures('unpickler')
def test_code_in_a_file_does_not_run(tmp_path, monkeypatch, asked, way):
    path, trace = tmp_path / 'w.pth', tmp_path / 'trace'
    attack = ATTACKS[asked](str(trace))
    torch.save({'state_dict': {'w': torch.ones(2)}, 'x': attack}, path)
    name = as_url(monkeypatch, path) if way == 'URL' else str(path)
    with pytest.raises(ValueError, match=rf'{asked}.*trusted://') as error:
        WAYS[way](name)
    assert str(error.value).startswith(name)
    assert len(str(error.value).splitlines()) == 1
    assert not trace.exists()
    WAYS[way](f'trusted://{name}')
    assert trace.exists()


@pytest.mark.parametrize('zipped', [True, False])
@pytest.mark.usefixtures('unpickler')
def test_code_in_torchs_older_format_does_not_run(tmp_path, zipped):
    path, trace = tmp_path / 'w.pth', tmp_path / 'trace'
    torch.save(
        {'x': Call(os.system, f'touch {trace}')},
        path,
        _use_new_zipfile_serialization=zipped,
    )
    with pytest.raises(ValueError, match=r'posix\.system'):
        read_weights(str(path))
    # torch reads a few pickles before the one with the weights.
    path.write_bytes(
        pickle.dumps(Call(os.system, f'touch {trace}'), protocol=2)
    )
    with pytest.raises(ValueError, match=r'posix\.system'):
        read_weights(str(path))
    assert not trace.exists()


@pytest.mark.parametrize('numpy', ['numpy.core', 'numpy._core'])
@pytest.mark.parametrize('zipped', [True, False])
@pytest.mark.usefixtures('unpickler')
def test_what_mmengine_saves_is_read(tmp_path, zipped, numpy):
    buffer = HistoryBuffer()
    for value in (3.0, 1.0, 2.0):
        buffer.update(value)
    content = {
        'state_dict': {'w': torch.arange(3.0)},
        'meta': ConfigDict(classes=('a', 'b'), colors=[{'a': 1}]),
        'message_hub': {
            'log_scalars': {'loss': buffer},
            'runtime_info': {
                'best': np.float64(0.5),
                'step': np.int64(7),
                'names': np.array(['a', 'b']),
                'nothing': np.zeros(0),
                'both': {1, 2},
            },
        },
    }
    path = tmp_path / 'w.pth'
    torch.save(content, path, _use_new_zipfile_serialization=zipped)
    _name_numpys_module(path, numpy, zipped)
    read = read_weights(str(path))
    assert torch.equal(read['state_dict']['w'], torch.arange(3.0))
    assert read['meta'] == content['meta']
    assert type(read['meta']) is ConfigDict
    hub = read['message_hub']
    loss = hub['log_scalars']['loss']
    assert (loss.mean(), loss.max(), loss.statistics('min')) == (2, 3, 1)
    assert hub['runtime_info']['best'] == 0.5
    assert hub['runtime_info']['step'] == 7
    assert list(hub['runtime_info']['names']) == ['a', 'b']
    assert hub['runtime_info']['nothing'].shape == (0,)
    assert hub['runtime_info']['both'] == {1, 2}


def _name_numpys_module(path, numpy, zipped):
    """Write the file anew as the other NumPy would have named its module."""

    def renamed(data):
        return re.sub(
            rb'numpy\._?core\.multiarray', f'{numpy}.multiarray'.encode(), data
        )

    if not zipped:
        path.write_bytes(renamed(path.read_bytes()))
        return
    with zipfile.ZipFile(path) as archive:
        members = {n: archive.read(n) for n in archive.namelist()}
    with zipfile.ZipFile(path, 'w') as archive:
        for name, data in members.items():
            if name.endswith('data.pkl'):
                data = renamed(data)
            archive.writestr(name, data)


@pytest.mark.usefixtures('unpickler')
def test_getattr_gives_the_statistics_only(tmp_path):
    path = tmp_path / 'w.pth'
    for owner, name in (
        (HistoryBuffer, '__init__'),
        (HistoryBuffer, '_statistics_methods'),
        (HistoryBuffer, 'register_statistics'),
        (torch.Tensor, 'mean'),
        ({}, 'get'),
    ):
        torch.save({'x': Call(getattr, owner, name)}, path)
        with pytest.raises(ValueError, match='getattr'):
            read_weights(str(path))


FORCE = 'TORCH_FORCE_WEIGHTS_ONLY_LOAD'
FORCE_NOT = 'TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD'


@pytest.mark.parametrize(
    'environment', [{}, {FORCE: '0'}, {FORCE: '1'}, {FORCE_NOT: '1'}]
)
@pytest.mark.parametrize('remote', [True, False])
def test_environment_changes_nothing(
    tmp_path, monkeypatch, environment, remote
):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    for name, content in {
        'good.pth': {'w': torch.ones(2)},
        'bad.pth': {'w': Call(os.system, f'touch {tmp_path}/trace')},
    }.items():
        path = tmp_path / name
        torch.save(content, path)
        source = as_url(monkeypatch, path) if remote else str(path)
        if name == 'good.pth':
            assert torch.equal(read_weights(source)['w'], torch.ones(2))
        else:
            with pytest.raises(ValueError, match=r'posix\.system'):
                read_weights(source)
    assert not (tmp_path / 'trace').exists()
    for name in (FORCE, FORCE_NOT):
        assert os.environ.get(name) == environment.get(name)


def test_shards_are_read_in_safe_mode(tmp_path):
    trace = tmp_path / 'trace'
    torch.save({'w': Call(os.system, f'touch {trace}')}, tmp_path / 'part.bin')
    index = tmp_path / 'pytorch_model.bin.index.json'
    index.write_text(json.dumps({'weight_map': {'w': 'part.bin'}}))
    with pytest.raises(ValueError, match=r'part\.bin asks for posix\.system'):
        read_weights(str(tmp_path))
    assert not trace.exists()
    read_weights(f'trusted://{tmp_path}')
    assert trace.exists()
