"""Every kind of path: read by its content, or said in one line."""

import io
import json
import tarfile
import zipfile

import pytest
import torch
from mmengine.runner.checkpoint import CheckpointLoader
from safetensors.torch import save, save_file

from mmcv_custom.files import read_weights, reading

WEIGHTS = {'vision.w': torch.arange(3.0), 'language.w': torch.ones(2)}


def torch_bytes(content=WEIGHTS, **options):
    buffer = io.BytesIO()
    torch.save(content, buffer, **options)
    return buffer.getvalue()


def zip_of(**members):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, 'w') as archive:
        for name, data in members.items():
            archive.writestr(f'w/{name}', data)
    return buffer.getvalue()


def tar_bytes():
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode='w') as archive:
        archive.addfile(tarfile.TarInfo('weights'))
    return buffer.getvalue()


def torchscript_bytes():
    buffer = io.BytesIO()
    torch.jit.save(
        torch.jit.trace(torch.nn.Linear(2, 2), torch.ones(2)), buffer
    )
    return buffer.getvalue()


def old_format(content=WEIGHTS):
    return torch_bytes(content, _use_new_zipfile_serialization=False)


NO_WEIGHTS = {
    'empty': (lambda: b'', r'is empty \(0 bytes\)'),
    'git-lfs pointer': (
        lambda: (
            b'version https://git-lfs.github.com/spec/v1\n'
            b'oid sha256:4d7a\nsize 11800000000\n'
        ),
        'is a git-lfs pointer.*git lfs pull',
    ),
    'web page': (lambda: b'\n<!DOCTYPE html><html>', 'is an HTML or XML page'),
    'gzip': (lambda: b'\x1f\x8b\x08' + bytes(9), 'is a gzip archive'),
    'tar': (tar_bytes, 'is a tar archive'),
    'zip': (lambda: zip_of(readme='no'), 'is a zip archive, but no'),
    'TorchScript': (torchscript_bytes, 'is a TorchScript archive'),
    'JSON': (
        lambda: b'{"hidden_size": 3200}',
        "JSON file without 'weight_map",
    ),
    'text': (lambda: b'weights, honestly', "neither.*b'weights, hon'"),
    'a JSON list': (lambda: b'[1, 2, 3]', 'neither a checkpoint'),
    'half of a checkpoint': (
        lambda: torch_bytes()[:-600],
        'is the beginning of a checkpoint.*copy it again',
    ),
    'half of an old checkpoint': (
        lambda: old_format({'w': torch.ones(100)})[:-300],
        'cannot be read.*incomplete',
    ),
    'the start of an old checkpoint': (
        lambda: old_format()[:40],
        'cannot be read.*incomplete',
    ),
    'half of safetensors': (
        lambda: save(WEIGHTS)[:-4],
        'is a safetensors file that cannot be read.*incomplete',
    ),
    'a pickle of something else': (
        lambda: b'\x80\x02K\x01.',
        'cannot be read as a checkpoint of torch',
    ),
}


@pytest.mark.parametrize(
    'read', [read_weights, CheckpointLoader.load_checkpoint]
)
@pytest.mark.parametrize('suffix', ['pth', 'safetensors'])
@pytest.mark.parametrize('kind', sorted(NO_WEIGHTS))
def test_what_holds_no_weights_is_said_in_one_line(
    tmp_path, kind, suffix, read
):
    make, message = NO_WEIGHTS[kind]
    path = tmp_path / f'weights.{suffix}'
    path.write_bytes(make())
    with pytest.raises(ValueError, match=message) as error:
        read(str(path))
    assert str(error.value).startswith(f'{path} ')
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize('name', ['w.pth', 'w.safetensors', 'w.bin', 'w'])
@pytest.mark.parametrize('make', [torch_bytes, old_format, save])
def test_the_content_decides_not_the_name(tmp_path, name, make):
    path = tmp_path / name
    path.write_bytes(make(WEIGHTS))
    for read in (read_weights, CheckpointLoader.load_checkpoint):
        content = read(str(path))
        assert content.keys() == WEIGHTS.keys()
        assert all(torch.equal(content[n], v) for n, v in WEIGHTS.items())


@pytest.mark.parametrize(
    ('path', 'message'),
    [
        ('no/such/file.pth', 'is no file and no folder$'),
        (
            'OpenGVLab/InternViT-6B-224px',
            'hf download OpenGVLab/InternViT-6B-224px --local-dir DIR',
        ),
    ],
)
def test_nothing_there(path, message):
    with pytest.raises(FileNotFoundError, match=message) as error:
        read_weights(path)
    assert str(error.value).startswith(path)


def write_shards(folder, make=save, suffix='safetensors'):
    """The vision and the language part, and one with both."""
    parts = {
        'a': {'vision.w': torch.arange(3.0)},
        'b': {'language.w': torch.ones(2)},
        'c': {'vision.v': torch.zeros(1), 'language.v': torch.zeros(2)},
    }
    folder.mkdir(exist_ok=True)
    index = {}
    for part, weights in parts.items():
        (folder / f'{part}.{suffix}').write_bytes(make(weights))
        index.update(dict.fromkeys(weights, f'{part}.{suffix}'))
    path = folder / f'model.{suffix}.index.json'
    path.write_text(json.dumps({'metadata': {}, 'weight_map': index}))
    return path


def vision(names):
    return [name for name in names if name.startswith('vision.')]


@pytest.mark.parametrize(
    ('make', 'suffix'), [(save, 'safetensors'), (torch_bytes, 'bin')]
)
def test_only_the_wanted_shards_are_opened(
    tmp_path, monkeypatch, make, suffix
):
    path = write_shards(tmp_path, make, suffix)
    opened = []
    kind_of = reading.kind_of
    monkeypatch.setattr(
        reading, 'kind_of', lambda p: (opened.append(p), kind_of(p))[1]
    )
    for name in (path, tmp_path):
        assert sorted(read_weights(str(name), vision)) == [
            'vision.v',
            'vision.w',
        ]
        assert opened == [
            str(p)
            for p in (path, tmp_path / f'a.{suffix}', tmp_path / f'c.{suffix}')
        ]
        opened.clear()
    # A shard that nobody needs may be missing.
    (tmp_path / f'b.{suffix}').unlink()
    assert len(read_weights(str(path), vision)) == 2
    with pytest.raises(
        FileNotFoundError, match=rf'{path} names the shard b\.{suffix}'
    ):
        read_weights(str(path))


def test_shard_without_a_tensor_of_the_index(tmp_path):
    path = write_shards(tmp_path)
    save_file({'other': torch.ones(1)}, tmp_path / 'a.safetensors')
    with pytest.raises(ValueError, match=r'names vision\.w in the shard a\.s'):
        read_weights(str(path))


def test_only_wanted_tensors_of_a_file_are_read(tmp_path):
    save_file(WEIGHTS, tmp_path / 'w.safetensors')
    assert list(read_weights(str(tmp_path), vision)) == ['vision.w']


@pytest.mark.parametrize(
    ('names', 'found'),
    [
        (['w.pth'], 'w.pth'),
        (['model.safetensors', 'pytorch_model.bin'], 'model.safetensors'),
        (['model.safetensors', 'optimizer.pt'], 'model.safetensors'),
        (
            ['iter_2.pth', 'iter_4.pth'],
            r'2 files \*\.pt\* \(iter_2\.pth, iter',
        ),
        (['config.json'], 'without a file of weights'),
        ([], 'without a file of weights'),
    ],
)
def test_folders(tmp_path, names, found):
    for name in names:
        weights = {name: torch.ones(1)}
        (tmp_path / name).write_bytes(
            save(weights) if 'safetensors' in name else torch_bytes(weights)
        )
    (tmp_path / 'iter_4.pth.comm_hook').mkdir()
    if found in names:
        assert list(read_weights(str(tmp_path))) == [found]
        return
    with pytest.raises((ValueError, FileNotFoundError), match=found) as error:
        read_weights(str(tmp_path))
    assert str(error.value).startswith(str(tmp_path))
