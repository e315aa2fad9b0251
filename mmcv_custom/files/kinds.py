"""What a file is, judged from its content: names lie."""

import json
import os
import re
import tarfile
import zipfile
from pathlib import Path

__all__ = ['find_file', 'kind_of']

# The files of weights that a folder is searched for, in this order.
PATTERNS = (
    '*.safetensors.index.json',
    '*.safetensors',
    '*.bin.index.json',
    '*.bin',
    '*.pt*',
)
# The safetensors library refuses longer headers.
LONGEST_HEADER_BYTES = 100_000_000
BEGINNINGS = {
    b'version https://git-lfs': (
        'a git-lfs pointer, not the file itself, which `git lfs pull` fetches'
    ),
    b'<': 'an HTML or XML page: the download did not give the file',
    b'\x1f\x8b': 'a gzip archive: unpack it',
    b'BZh': 'a bzip2 archive: unpack it',
    b'\xfd7zXZ': 'an xz archive: unpack it',
}


def find_file(path: str) -> str:
    """The file of weights that a path means.

    Args:
        path: A file, or a folder with one checkpoint or one index of shards.

    Returns:
        The path of a file.

    Raises:
        FileNotFoundError: Nothing there.
        ValueError: A folder with several files of the same kind.
    """
    path = os.path.expanduser(path)
    if os.path.isfile(path):
        return path
    if not os.path.isdir(path):
        hint = ''
        if re.fullmatch(r'[\w.-]+/[\w.-]+', path):
            hint = (
                '. If it is a name on the Hugging Face hub: `hf download '
                f'{path} --local-dir DIR`, and give DIR'
            )
        raise FileNotFoundError(f'{path} is no file and no folder{hint}')
    for pattern in PATTERNS:
        found = sorted(f for f in Path(path).glob(pattern) if f.is_file())
        if len(found) == 1:
            return str(found[0])
        if found:
            names = ', '.join(file.name for file in found[:4])
            raise ValueError(
                f'{path} is a folder with {len(found)} files {pattern} '
                f'({names}{", ..." if len(found) > 4 else ""}); name one'
            )
    raise FileNotFoundError(
        f'{path} is a folder without a file of weights ({", ".join(PATTERNS)})'
    )


def kind_of(path: str) -> str:
    """Say in which format a file holds weights.

    Args:
        path: An existing file.

    Returns:
        'safetensors', 'index' (of shards) or 'torch'.

    Raises:
        ValueError: It holds no weights. The message names the file and says
            in one line what it is.
    """
    with open(path, 'rb') as file:
        head = file.read(64)
    if _is_safetensors(head):
        return 'safetensors'
    if head.lstrip().startswith(b'{') and _is_index(path):
        return 'index'
    if head.startswith(b'PK\x03\x04'):
        _check_zip(path)
        return 'torch'
    if head.startswith(b'\x80'):  # torch's format before 1.6
        return 'torch'
    raise ValueError(f'{path} is {_describe(path, head)}')


def _is_safetensors(head: bytes) -> bool:
    size = int.from_bytes(head[:8], 'little')
    return head[8:9] == b'{' and 2 <= size <= LONGEST_HEADER_BYTES


def _is_index(path: str) -> bool:
    try:
        content = json.loads(Path(path).read_bytes())
    except ValueError:
        return False
    if isinstance(content.get('weight_map'), dict):
        return True
    raise ValueError(
        f"{path} is a JSON file without 'weight_map', so no index of shards"
    )


def _check_zip(path: str) -> None:
    """Refuse an archive that is not torch's."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = {name.split('/')[-1] for name in archive.namelist()}
    except zipfile.BadZipFile as error:
        raise ValueError(
            f'{path} is the beginning of a checkpoint or of another zip '
            'archive: the end is missing, copy it again'
        ) from error
    if 'constants.pkl' in names:
        raise ValueError(
            f'{path} is a TorchScript archive: a program, not weights'
        )
    if 'data.pkl' not in names:
        raise ValueError(f'{path} is a zip archive, but no checkpoint')


def _describe(path: str, head: bytes) -> str:
    if not head:
        return 'empty (0 bytes)'
    for beginning, description in BEGINNINGS.items():
        if head.lstrip().startswith(beginning):
            return description
    if tarfile.is_tarfile(path):
        return 'a tar archive: unpack it'
    return (
        'neither a checkpoint of torch nor a safetensors file: it begins '
        f'with {head[:12]!r}'
    )
