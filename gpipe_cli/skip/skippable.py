"""The decorator `@skippable`, and the module it makes of a class whose forward is a generator.

Decides what a layer may stash and pop and under which names. Whether the layers of a model fit each other is
`verify`'s matter, where the tensors go the tracker's.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, ClassVar, Self, TypeAlias

from torch import Tensor, nn

from gpipe_cli.skip.command import pop, stash
from gpipe_cli.skip.name import DEFAULT, Namespace, SkipName
from gpipe_cli.skip.tracker import current_skip_tracker

Commands: TypeAlias = Generator[stash | pop, Tensor | None, Any]
"""What calling a skippable layer's own forward gives."""


def skippable(
    stash: Iterable[str] = (), pop: Iterable[str] = ()
) -> Callable[[type[nn.Module]], type[Skippable]]:
    """Declare which names the decorated module's forward stashes and which it pops."""
    stashable, poppable = _names("stash", stash), _names("pop", pop)

    def decorate(module_class: type[nn.Module]) -> type[Skippable]:
        attributes = {
            "__doc__": module_class.__doc__,
            "__module__": module_class.__module__,
            "__qualname__": module_class.__qualname__,
            "module_class": module_class,
            "stashable_names": stashable,
            "poppable_names": poppable,
        }
        # The decorated name now means the new class; pickle finds the old one as its attribute.
        module_class.__qualname__ += ".module_class"
        return type(module_class.__name__, (Skippable,), attributes)

    return decorate


class Skippable(nn.Module):
    """Runs `module`, carrying out the commands its forward yields. Made by `@skippable` only."""

    module_class: ClassVar[type[nn.Module]]
    stashable_names: ClassVar[frozenset[str]]
    poppable_names: ClassVar[frozenset[str]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.module = self.module_class(*args, **kwargs)
        self._namespaces: dict[str, Namespace] = {}

    def isolate(self, namespace: Namespace, *, only: Iterable[str] | None = None) -> Self:
        """Put all skips of this layer, or `only` those named, into a namespace."""
        declared = self.stashable_names | self.poppable_names
        names = declared if only is None else _names("only", only)
        if unknown := sorted(names - declared):
            raise ValueError(f"'{unknown[0]}' to isolate has not been declared as stashable or poppable")
        self._namespaces.update(dict.fromkeys(names, namespace))
        return self

    def stashable(self) -> list[SkipName]:
        return sorted(map(self._full_name, self.stashable_names))

    def poppable(self) -> list[SkipName]:
        return sorted(map(self._full_name, self.poppable_names))

    def forward(self, input: Any) -> Any:
        unstashed, unpopped = set(self.stashable_names), set(self.poppable_names)
        output = self.module(input)
        # A forward without any yield is no generator, and what it returns is the output.
        if isinstance(output, Generator):
            output = self._carry_out_all(output, unstashed, unpopped)
        _require_none("stashed", unstashed)
        _require_none("popped", unpopped)
        return output

    def _carry_out_all(self, commands: Commands, unstashed: set[str], unpopped: set[str]) -> Any:
        """Answer each command until the forward returns; the sets lose what was done."""
        answer: Tensor | None = None
        while True:
            try:
                command = commands.send(answer)
            except StopIteration as stop:
                return stop.value
            answer = None
            if isinstance(command, stash):
                self._stash(command)
                unstashed.discard(command.name)
            elif isinstance(command, pop):
                answer = self._pop(command)
                unpopped.discard(command.name)
            else:
                raise TypeError(f"{command!r} is not a command from @skippable")

    def _stash(self, command: stash) -> None:
        if command.name not in self.stashable_names:
            raise RuntimeError(f"'{command.name}' has not been declared as stashable")
        current_skip_tracker().save(self._full_name(command.name), _as_own_node(command.value))

    def _pop(self, command: pop) -> Tensor | None:
        if command.name not in self.poppable_names:
            raise RuntimeError(f"'{command.name}' has not been declared as poppable")
        try:
            return current_skip_tracker().load(self._full_name(command.name))
        except KeyError as error:
            raise RuntimeError(f"'{command.name}' has not been stashed") from error

    def _full_name(self, name: str) -> SkipName:
        return SkipName(self._namespaces.get(name, DEFAULT), name)

    def __repr__(self) -> str:
        return f"@skippable({self.module})"


def _as_own_node(value: Tensor | None) -> Tensor | None:
    """The same tensor, for autograd one step further.

    The gradients of all uses of a skip are summed before they meet those of the value's other uses, and after them:
    so the order of the sum, and its bits, are the same whether or not the skip leaves its partition. Also without a
    gradient, so that a checkpointed forward passes on what its recomputation will.
    """
    return None if value is None else value.view_as(value)


def named_skippables(module: nn.Module, name: str = "") -> Iterator[tuple[str, Skippable]]:
    """The skippable modules in a module, itself included, with their paths; one used twice comes twice."""
    for path, nested in module.named_modules(prefix=name, remove_duplicate=False):
        if isinstance(nested, Skippable):
            yield path, nested


def _names(word: str, names: Iterable[str]) -> frozenset[str]:
    if isinstance(names, str):
        raise TypeError(f"{word} takes a list of names, got the string {names!r}; write [{names!r}]")
    return frozenset(names)


def _require_none(word: str, names: set[str]) -> None:
    if names:
        listed = ", ".join(f"'{name}'" for name in sorted(names))
        raise RuntimeError(f"{listed} must be {word} but have not")
