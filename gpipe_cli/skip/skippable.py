"""Which layer stashes and pops which skips: `@skippable`, its commands, the check that they match, and the routes.

`Skippable` runs a forward that is a generator and carries out the commands it yields. Skips within a partition have no
route: they need no transport. Others go directly from the partition that stashes them to the one that pops them
(pipeline/channels.py); between ranks they pass through every partition on the way (distributed/boundary_shapes.py).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol, Self, TypeAlias, final, runtime_checkable

from torch import Tensor, nn

from gpipe_cli.skip.tracker import Namespace, SkipName, load_skip, save_skip


# Commands are classes in lower case because they read as verbs: `yield stash("skip", tensor)`.
@final
@dataclass(frozen=True, slots=True, eq=False)
class stash:
    """`yield stash("skip", tensor)` stores a tensor, or None, for the layer that pops it."""

    name: str
    value: Tensor | None

    def __post_init__(self) -> None:
        if not isinstance(self.value, Tensor | None):
            raise TypeError(
                f"stash({self.name!r}, ...) takes a Tensor or None, got {type(self.value).__name__}"
            )


@final
@dataclass(frozen=True, slots=True, eq=False)
class pop:
    """`tensor = yield pop("skip")` returns the stashed value; a value can be popped once."""

    name: str


Commands: TypeAlias = Generator[stash | pop, Tensor | None, Any]
"""The return type of a skippable module's own forward."""


def skippable(
    stash: Iterable[str] = (), pop: Iterable[str] = ()
) -> Callable[[type[nn.Module]], type[Skippable]]:
    """Declare which names the decorated module's forward stashes and which it pops."""
    stashable, poppable = _name_set("stash", stash), _name_set("pop", pop)

    def decorate(module_class: type[nn.Module]) -> type[Skippable]:
        attributes = {
            "__doc__": module_class.__doc__,
            "__module__": module_class.__module__,
            "__qualname__": module_class.__qualname__,
            "module_class": module_class,
            "stashable_names": stashable,
            "poppable_names": poppable,
        }
        # The decorated name now refers to the new class; pickle finds the original class as its attribute.
        module_class.__qualname__ += ".module_class"
        return type(module_class.__name__, (Skippable,), attributes)

    return decorate


class Skippable(nn.Module):
    """Runs `module` and carries out the commands that its forward yields. Created by `@skippable` only."""

    module_class: ClassVar[type[nn.Module]]
    stashable_names: ClassVar[frozenset[str]]
    poppable_names: ClassVar[frozenset[str]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.module = self.module_class(*args, **kwargs)
        self._namespaces: dict[str, Namespace | None] = {}

    def isolate(self, namespace: Namespace | None, *, only: Iterable[str] | None = None) -> Self:
        """Put all skips of this layer, or `only` the named ones, into a namespace."""
        declared = self.stashable_names | self.poppable_names
        names = declared if only is None else _name_set("only", only)
        if unknown := sorted(names - declared):
            raise ValueError(f"'{unknown[0]}' to isolate has not been declared as stashable or poppable")
        self._namespaces.update(dict.fromkeys(names, namespace))
        return self

    def namespaced(self, name: str) -> SkipName:
        """The namespace of a skip of this layer, None unless it is isolated, and its name."""
        return SkipName(self._namespaces.get(name), name)

    def stashable(self) -> list[SkipName]:
        """The skips that this layer stashes."""
        return sorted(map(self.namespaced, self.stashable_names))

    def poppable(self) -> list[SkipName]:
        """The skips that this layer pops."""
        return sorted(map(self.namespaced, self.poppable_names))

    def forward(self, input: Any) -> Any:
        unstashed, unpopped = set(self.stashable_names), set(self.poppable_names)

        def handle_stash(name: str, value: Tensor | None) -> None:
            if name not in self.stashable_names:
                raise RuntimeError(f"'{name}' has not been declared as stashable")
            save_skip(self.namespaced(name), value)
            unstashed.discard(name)

        def handle_pop(name: str) -> Tensor | None:
            if name not in self.poppable_names:
                raise RuntimeError(f"'{name}' has not been declared as poppable")
            unpopped.discard(name)
            return load_skip(self.namespaced(name))

        output = self.dispatch(input, handle_stash, handle_pop)
        for names, participle in ((unstashed, "stashed"), (unpopped, "popped")):
            if names:
                listed = ", ".join(f"'{name}'" for name in sorted(names))
                raise RuntimeError(f"{listed} must be {participle} but have not")
        return output

    def dispatch(
        self,
        input: Any,
        handle_stash: Callable[[str, Tensor | None], object],
        handle_pop: Callable[[str], Tensor | None],
    ) -> Any:
        """Run the module's own forward, and let two functions of yours carry out what it stashes and pops."""
        output = self.module(input)
        # A forward without any yield is not a generator function: its return value is the output.
        if not isinstance(output, Generator):
            return output
        answer: Tensor | None = None
        while True:
            try:
                command = output.send(answer)
            except StopIteration as stop:
                return stop.value
            answer = None
            if isinstance(command, stash):
                handle_stash(command.name, command.value)
            elif isinstance(command, pop):
                answer = handle_pop(command.name)
            else:
                raise TypeError(f"{command!r} is not a command from @skippable")

    def __repr__(self) -> str:
        return f"@skippable({self.module})"


def _name_set(parameter: str, names: Iterable[str]) -> frozenset[str]:
    if isinstance(names, str):
        raise TypeError(f"{parameter} takes a list of names, got the string {names!r}; write [{names!r}]")
    return frozenset(names)


@runtime_checkable
class DeclaresSkips(Protocol):
    """A module that says which skips it stashes and pops: a `Skippable`, or a traced layer."""

    def stashable(self) -> list[SkipName]: ...
    def poppable(self) -> list[SkipName]: ...


def named_skippables(module: nn.Module, name: str = "") -> Iterator[tuple[str, DeclaresSkips]]:
    """Yield the modules with skips in a module, itself included, with their paths; duplicates are not removed."""
    for path, nested in module.named_modules(prefix=name, remove_duplicate=False):
        if isinstance(nested, DeclaresSkips) and (nested.stashable() or nested.poppable()):
            yield path, nested


def verify_skippables(module: nn.Module) -> None:
    """Raise TypeError unless one layer stashes each skip and the same or a later layer pops it.

    Within a layer the order in which nested modules run is not known here; a pop that comes too early there
    raises when it runs.
    """
    stashed: set[SkipName] = set()
    popped: set[SkipName] = set()
    problems: list[str] = []
    for name, layer in module.named_children():
        problems += _layer_problems(name, layer, stashed, popped)
    problems += [
        f"no module declared '{skip.name}' as poppable but stashed" for skip in sorted(stashed - popped)
    ]
    if problems:
        listed = "\n".join(f"* {problem}" for problem in problems)
        raise TypeError(f"one or more pairs of stash and pop do not match:\n\n{listed}")


def _layer_problems(
    name: str, layer: nn.Module, stashed: set[SkipName], popped: set[SkipName]
) -> Iterator[str]:
    """Yield what is wrong with a layer, given the skips of the layers before it; add its own to the sets."""
    nested = list(named_skippables(layer, name))
    for path, module in nested:
        for both in sorted(set(module.stashable()) & set(module.poppable())):
            yield f"'{path}' declared '{both.name}' both as stashable and as poppable"
        for skip in module.stashable():
            if skip in stashed:
                yield f"'{path}' redeclared '{skip.name}' as stashable but not isolated by namespace"
            stashed.add(skip)
    for path, module in nested:
        for skip in module.poppable():
            if skip not in stashed:
                yield f"'{path}' declared '{skip.name}' as poppable but it was not stashed"
            if skip in popped:
                yield f"'{path}' redeclared '{skip.name}' as poppable but not isolated by namespace"
            popped.add(skip)


@final
class SkipRoute(NamedTuple):
    """A skip that leaves its partition, and the partition at the other end."""

    name: SkipName
    partition: int


@final
@dataclass(frozen=True, slots=True)
class SkipLayout:
    """For each partition the skips it sends and receives, ordered by name."""

    sends: tuple[tuple[SkipRoute, ...], ...]
    receives: tuple[tuple[SkipRoute, ...], ...]


def skip_layout(partitions: Sequence[nn.Module]) -> SkipLayout:
    """Return the routes of all skips that one partition stashes and another pops."""
    stashed_in: dict[SkipName, int] = {}
    popped_in: dict[SkipName, int] = {}
    for index, partition in enumerate(partitions):
        for _, module in named_skippables(partition):
            stashed_in.update(dict.fromkeys(module.stashable(), index))
            popped_in.update(dict.fromkeys(module.poppable(), index))
    return SkipLayout(
        sends=_routes(stashed_in, popped_in, len(partitions)),
        receives=_routes(popped_in, stashed_in, len(partitions)),
    )


def _routes(
    near: dict[SkipName, int], far: dict[SkipName, int], partitions: int
) -> tuple[tuple[SkipRoute, ...], ...]:
    """For each partition at the `near` end its routes to the `far` end."""
    # Sorted: both ends of a boundary must send and receive their skips in the same order.
    crossing = sorted(name for name in near if name in far and near[name] != far[name])
    return tuple(
        tuple(SkipRoute(name, far[name]) for name in crossing if near[name] == index)
        for index in range(partitions)
    )
