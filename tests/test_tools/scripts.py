"""Run the scripts of ``tools`` as a user would."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
TOOLS = REPO / 'tools'
CONFIGS = REPO / 'configs/internvit'
(DEMO,) = CONFIGS.glob('*shapes*')

# Lines of a config that make the demo small. 7 images for two processes with
# batches of 2, and 3 to evaluate: neither number can be shared out evenly.
SMALL = """
shapes = dict(num_train=7, num_val=3, image_size=56)
train_dataloader = dict(batch_size=2, dataset=shapes)
val_dataloader = dict(dataset=shapes)
test_dataloader = dict(dataset=shapes)
model = dict(
    data_preprocessor=dict(size=(56, 56)),
    backbone=dict(
        arch=dict(embed_dims=32, num_heads=2), img_size=56, patch_size=14))
default_hooks = dict(
    logger=dict(interval=1), visualization=dict(draw=True, interval=1))
"""
# The demo itself, for four iterations.
SMALL_DEMO = f"""
_base_ = {str(DEMO)!r}
{SMALL}
model['decode_head'] = dict(in_channels=32)
train_cfg = dict(max_iters=4, val_interval=4)
default_hooks['checkpoint'] = dict(interval=4)
"""


def run(*command, cwd, timeout_s=120, env=None, check=True):
    """Run a command; on failure show what it printed.

    Args:
        *command: Program and arguments.
        cwd: Folder to run in.
        timeout_s: The process and its children are killed after that.
        env: Replacements in the environment; None removes a variable.
        check: Whether a non-zero exit status is a failure.

    Returns:
        The finished process, its ``stdout`` with the error output.
    """
    environment = {
        'PATH': f'{Path(sys.executable).parent}:{os.environ["PATH"]}',
        'HOME': str(cwd),
        'OMP_NUM_THREADS': '1',
        **(env or {}),
    }
    process = subprocess.Popen(
        [str(part) for part in command],
        cwd=cwd,
        env={k: v for k, v in environment.items() if v is not None},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # A group of its own, so that the workers of a launcher die with it.
        start_new_session=True,
    )
    try:
        output = process.communicate(timeout=timeout_s)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        output = process.communicate()[0]
        raise AssertionError(
            f'{command} did not end in {timeout_s} s:\n{output}'
        ) from None
    result = subprocess.CompletedProcess(command, process.returncode, output)
    if check:
        assert result.returncode == 0, f'{command}:\n{output}'
    return result


def load_tool(name):
    """Import ``tools/NAME.py``, which belongs to no package."""
    path = str(TOOLS)
    sys.path.insert(0, path)
    try:
        spec = importlib.util.spec_from_file_location(
            f'mmcv_custom_tool_{name}', TOOLS / f'{name}.py'
        )
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(path)
    return module


def fake_program(folder, name, body):
    """Put a bash script on a ``PATH``.

    Args:
        folder: Folder to write into.
        name: Name of the program.
        body: What it does.

    Returns:
        The ``PATH`` that finds it first.
    """
    folder.mkdir(exist_ok=True)
    program = folder / name
    program.write_text(f'#!{shutil.which("bash")}\n{body}\n')
    program.chmod(0o755)
    return f'{folder}:{os.environ["PATH"]}'
