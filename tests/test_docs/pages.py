"""The code blocks and commands of the documentation, and what each is."""

import ast
import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / 'README.md', *sorted((ROOT / 'docs').glob('*.md'))]

_FENCED = re.compile(r'^```(\w*)\n(.*?)^```\n', re.MULTILINE | re.DOTALL)
# Within the text: a program with its arguments, or options for a training.
_INLINE = re.compile(
    r'`((?:pip|pytest|python|torchrun|pre-commit|tools/[\w./]+) [^`]+|pytest)`'
    r'|`(?:--cfg-options\s+)?(ddp_comm_hook[.=][^`]+)`'
    r'|`--cfg-options\s+([^`]+)`'
)


@dataclass(frozen=True)
class Block:
    """A fenced block, or a command within the text.

    Attributes:
        page: Its file.
        line: Of its first line.
        language: That is named at its fence.
        text: Ends with a line feed.
        fenced: Whether it is a block.
    """

    page: Path
    line: int
    language: str
    text: str
    fenced: bool = True

    def __str__(self):
        return f'{self.page.name}:{self.line}'

    @property
    def path(self):
        """Where a reader saves it, as its first line says; or None."""
        named = re.match(r'# (\S+\.py)\n', self.text)
        return named and named[1]

    @property
    def kind(self):
        """What it is, which says how it is tested; None if nothing fits."""
        if self.language == 'shell':
            return 'commands'
        if self.language == 'text' and '$ ' not in self.text:
            return 'drawing'
        if self.language == '' and self.text.startswith('$ '):
            return 'session'
        if self.language == 'diff' and self.path:
            return 'insertion'
        return self._kind_of_python() if self.language == 'python' else None

    def _kind_of_python(self):
        statements = ast.parse(self.text).body
        if self.path and self.path.startswith(('mmcv_custom/', 'tests/')):
            return 'contribution'
        if all(isinstance(s, ast.Assign) for s in statements):
            return 'config'
        if self.path:
            return 'hooks' if self.defined else 'script'
        return 'plain DDP' if 'ddp_model' in self.text else None

    @property
    def defined(self):
        """The functions and classes of a Python block."""
        return [
            statement.name
            for statement in ast.parse(self.text).body
            if isinstance(statement, (ast.FunctionDef, ast.ClassDef))
        ]

    @property
    def commands(self):
        """The lines for a shell, with something in the place of words."""
        text = self.text
        if self.kind == 'session':
            text = ''.join(re.findall(r'^\$ (.*\n)', text, re.MULTILINE))
        for word, value in PLACEHOLDERS.items():
            text = re.sub(rf'\b{word}\b', value, text)
        return text


PLACEHOLDERS = {
    'CONFIG': str(next((ROOT / 'configs/internvit').glob('*shapes*'))),
    'GPUS(?!=)': '2',
    'CHECKPOINT': 'some.pth',
    'FILE': 'some.safetensors',
    'DIR': 'some_folder',
    'PARTITION': 'some_partition',
    'JOB': 'some_job',
}


def _blocks_of(page):
    text = page.read_text()
    for match in _FENCED.finditer(text):
        line = text.count('\n', 0, match.start()) + 2
        yield Block(page, line, match[1], match[2])
    # Lines stay where they are.
    prose = _FENCED.sub(lambda match: '\n' * match[0].count('\n'), text)
    for match in _INLINE.finditer(prose):
        line = prose.count('\n', 0, match.start()) + 1
        command, *options = match.groups()
        if command is None:
            option = ' '.join((options[0] or options[1]).split())
            command = f'tools/dist_train.sh CONFIG GPUS --cfg-options {option}'
        yield Block(page, line, 'shell', f'{command}\n', fenced=False)


BLOCKS = [block for page in PAGES for block in _blocks_of(page)]


def blocks(*kinds):
    """Return the blocks of some kinds."""
    return [block for block in BLOCKS if block.kind in kinds]
