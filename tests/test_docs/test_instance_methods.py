"""What the engine uses of a hook's instance, and what the page says of it."""

import ast
import re

from .pages import ROOT

ENGINE = ROOT / 'mmcv_custom/engine'
PAGE = ROOT / 'docs/your_own_hook.md'
# Of the package's own hooks alone; see engine/registry.py.
INTERNAL = {'is_choice', 'is_measuring', 'in_turn', 'function', 'cast_dtype'}
# What instances, and their classes, are called in the engine.
INSTANCES = {'instance', '_instance'}
ASKED = {*INSTANCES, 'each', 'part', 'target', 'hook'}


def last_name(node):
    return ast.unparse(node).split('.')[-1]


def names_of_loops(tree):
    """The names of instances in loops over several."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.For, ast.comprehension)) and re.search(
            r'_sampled|_having\(', ast.unparse(node.iter)
        ):
            yield node.target.id


def names_used(tree):
    """What a module asks instances for."""
    instances = INSTANCES | {*names_of_loops(tree)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            if last_name(node.value) in instances:
                yield node.attr
        elif isinstance(node, ast.Call):
            function = last_name(node.func)
            is_asked = function in ('hasattr', 'getattr') and (
                last_name(node.args[0]) in ASKED
            )
            if is_asked or function in ('_having', '_sum', '_tell'):
                name = node.args[is_asked or function == '_tell']
                if isinstance(getattr(name, 'value', None), str):
                    yield name.value


def test_page_lists_what_the_engine_uses():
    used = set()
    for path in ENGINE.rglob('*.py'):
        used |= {*names_used(ast.parse(path.read_text()))}
    table = PAGE.read_text().partition('| method |')[2].partition('\n\n')[0]
    listed = {
        name
        for row in table.splitlines()[2:]
        for name in re.findall(r'`(\w+)', row.split('|')[1])
    }
    assert used == listed | INTERNAL
