"""Modules and functions are short enough to be read at once."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / 'mmcv_custom'
LONGEST_MODULE = 300
LONGEST_FUNCTION = 40  # its docstring and decorators not counted


def functions_of(text):
    """The functions of a module, nested ones too, with their lengths."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = node.end_lineno - node.lineno + 1
            if ast.get_docstring(node) is not None:
                docstring = node.body[0]
                lines -= docstring.end_lineno - docstring.lineno + 1
            yield node.name, lines


def test_docstrings_do_not_count():
    text = 'def f():\n    """One.\n\n    Two.\n    """\n    return 1\n'
    assert list(functions_of(text)) == [('f', 2)]


@pytest.mark.parametrize(
    'path',
    sorted(PACKAGE.rglob('*.py')),
    ids=lambda path: str(path.relative_to(PACKAGE)),
)
def test_module_and_functions_are_short(path):
    text = path.read_text()
    assert len(text.splitlines()) <= LONGEST_MODULE
    too_long = {n: k for n, k in functions_of(text) if k > LONGEST_FUNCTION}
    assert not too_long
