"""Which parameters DDP reduces, and whether the others still rest."""

import operator
from itertools import chain

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .contract import opaque
from .names import plain_name

__all__ = ['ReducedParameters', 'reduced_parameters', 'unreduced_names']


def reduced_parameters(
    ddp: DistributedDataParallel,
) -> dict[str, nn.Parameter]:
    """Return the parameters that a DDP built now would reduce.

    They need gradients, and DDP was not told to leave them alone.

    Returns:
        The parameters by their plain names, in the order of the model.
    """
    ignored = ddp.parameters_to_ignore
    names: dict[nn.Parameter, str] = {}
    for prefix, module in ddp.module.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            # As DDP does: with a dot before a name of the module itself.
            name = f'{prefix}.{name}'
            if parameter.requires_grad and name not in ignored:
                names.setdefault(parameter, plain_name(name.lstrip('.')))
    return {name: parameter for parameter, name in names.items()}


def unreduced_names(ddp: DistributedDataParallel) -> set[str]:
    """Return the plain names of the model's other parameters."""
    named = ddp.module.named_parameters(remove_duplicate=False)
    return {plain_name(n) for n, _ in named} - reduced_parameters(ddp).keys()


class ReducedParameters:
    """Tells when other parameters are trained than a DDP was built for.

    DDP takes no notice of a parameter that is unfrozen, added or put in
    another's place afterwards: each process would go on with gradients of
    its own.

    Args:
        ddp: Just built. It is not kept, so as not to keep it alive.
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._module = ddp.module
        self._reduced = set(reduced_parameters(ddp).values())
        self._remember()

    @opaque
    def check(self, ddp: DistributedDataParallel) -> None:
        """Look again; fast while nothing has changed.

        Args:
            ddp: The same one.

        Raises:
            RuntimeError: If a parameter needs gradients that DDP does not
                reduce.
        """
        if self._is_unchanged():
            return
        late = [
            name
            for name, parameter in reduced_parameters(ddp).items()
            if parameter not in self._reduced
        ]
        if late:
            more = f' and {len(late) - 1} more' if len(late) > 1 else ''
            raise RuntimeError(
                f'{late[0]}{more}: trained now, but frozen or not there when '
                'the model was wrapped, so DDP does not average their '
                'gradients and the processes would drift apart; unfreeze, '
                'add or replace parameters before the model is wrapped, as '
                'in the config, or go on in a new run with load_from'
            )
        self._remember()

    def _remember(self) -> None:
        modules = [*self._module.modules()]
        # Kept themselves: their ids must not be given to others.
        self._tables = [
            table for m in modules for table in (m._parameters, m._modules)
        ]
        self._entries = self._list_entries()
        self._parameters = [*self._module.parameters()]
        self._flags = self._list_flags()

    def _is_unchanged(self) -> bool:
        entries = self._list_entries()
        return (
            len(entries) == len(self._entries)
            and all(map(operator.is_, entries, self._entries))
            and self._list_flags() == self._flags
        )

    def _list_entries(self) -> list[object]:
        """The parameters and children of all modules that are known."""
        return [*chain.from_iterable(map(dict.values, self._tables))]

    def _list_flags(self) -> list[bool]:
        return [p.requires_grad for p in self._parameters]
