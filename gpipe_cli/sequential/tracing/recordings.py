"""Trace a model: record it at several sizes, in both modes and in two dtypes, and make a program of the recordings.

Python's control flow happens as it does in training, and nothing is symbolic. Instead, a size may vary if the model
makes the same calls at other sizes, and if each number among their arguments is a sum of products of the sizes.
Recordings at further sizes then verify the program.

A module that does not agree with this stays whole, if enough of the model is left to cut.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import product
from typing import Any, final

import torch
from torch import nn

from gpipe_cli.errors import ConfigError
from gpipe_cli.sequential.tracing.call_recorder import record
from gpipe_cli.sequential.tracing.generalize import Setting, check, check_modules, generalize, used_sizes
from gpipe_cli.sequential.tracing.graph import NotRecordable, SourceLine, TraceGraph
from gpipe_cli.sequential.tracing.leaves import Leaves, remedy
from gpipe_cli.sequential.tracing.sample import (
    InputCheck,
    Range,
    SampleArguments,
    Size,
    TraceSample,
    shapes_of,
)
from gpipe_cli.sequential.tracing.substitutes import MetaResults, Substitutes

_BATCHES = (2, 3)
_SHORT = 3
"""A sample of this length or less is varied to a longer one."""
_LONG = 256
"""Token ids of a shorter sample are also tried at this length."""


@final
class Trace:
    """What a model does, and for which inputs."""

    def __init__(self, model: nn.Module, sample: TraceSample, leaves: Leaves) -> None:
        self._model = model
        self._sample = sample
        self._leaves = leaves
        self._substitutes = {other: Substitutes(model, other_dtype=other) for other in (False, True)}
        self._results = MetaResults()
        self._recordings: dict[tuple[Any, ...], TraceGraph] = {}
        self.ranges: dict[Size, Range] = {}
        self._lowest: dict[Size, int] = {}
        self._disagreement: NotRecordable | None = None
        """The last thing that the model did differently at another size."""
        self.programs: dict[bool, TraceGraph] = {}
        """By mode; the same object for both if they differ in a few arguments only."""
        # Random numbers differ between the recordings, but those of the caller go on as if there had been none.
        with modes_restored(model), caches_disabled(model), torch.random.fork_rng(devices=[]):
            while not self._succeeds():
                self._recordings.clear()

    @property
    def other_sizes(self) -> dict[Size, int]:
        """A length other than the sample's for each size that varies."""
        return {
            size: max(allowed.least, size.given - 2)
            for size, allowed in self.ranges.items()
            if allowed.least < size.given and allowed.most is not None
        }

    @property
    def input_check(self) -> InputCheck:
        used = {size for program in self.programs.values() for size in used_sizes(program)}
        places = [
            (allowed, size.places)
            for size, allowed in self.ranges.items()
            if size in used or allowed.least > 1 or allowed.least == allowed.most
        ]
        return InputCheck(
            self._sample.keys, tuple(self._sample.names), tuple(self._sample.constants), tuple(places)
        )

    def raise_least(self, is_right_at: Callable[[dict[Size, int]], bool]) -> None:
        """Allow a size smaller than those recorded only if the outputs are right: the model may do something else."""
        for size, lowest in self._lowest.items():
            smaller = range(self.ranges[size].least, lowest)
            tried = sorted({*smaller[:2], *smaller[3:4], *smaller[len(smaller) // 2 :][:1]})
            least = next((number for number in tried if is_right_at({size: number})), lowest)
            self.ranges[size] = replace(self.ranges[size], least=least)

    def _succeeds(self) -> bool:
        try:
            self._trace()
        except NotRecordable as error:
            if not self._leaves.may_keep_whole(error.path):
                raise ConfigError(self._refusal(error)) from error
            self._leaves.keep_whole(error.path)
            return False
        return True

    def _trace(self) -> None:
        batch, *others = self._sample.sizes
        pairs: dict[Size, tuple[int, int]] = {batch: _BATCHES}
        # First of all: an input that the model does not accept is the first error.
        first = Setting(True, {batch: _BATCHES[0]})
        self._record(first)
        self._check_side_effects(first)
        self.ranges = {size: Range(size.given, size.given) for size in others}
        for size in others:
            other = size.given - 1 if size.given > _SHORT else size.given + 1
            program = self._program_for(batch, size, other)
            if program is not None and used_sizes(program):
                pairs[size] = (size.given, other)
            elif program is not None:
                self.ranges[size] = Range(1, None)
        self.programs = self._merge_modes(pairs)
        self._lowest = {size: min(numbers) for size, numbers in pairs.items()}
        given = {size: numbers[0] for size, numbers in pairs.items()}
        for size, numbers in pairs.items():
            self.ranges[size] = self._range(size, numbers, given)
        if not any(self._agrees({**given, batch: rows}) for rows in (1, _BATCHES[1] + 2)):
            raise self._disagreement or NotRecordable("", None, "it accepts no other batch size")

    def _program_for(self, batch: Size, size: Size, other: int) -> TraceGraph | None:
        """A program in which a size varies; None if the model does something else when it changes."""
        further = 2 * other - size.given
        first, second, third = (
            Setting(True, {batch: _BATCHES[0], size: number}) for number in (size.given, other, further)
        )
        try:
            program = generalize([(setting, self._record(setting)) for setting in (first, second)], [size])
            check(program, third, self._record(third))
            return program
        except NotRecordable as error:
            # Images of other sizes are rare; sequences of other lengths are not, and worth a module that stays whole.
            if self._sample.is_sequence(size) and self._leaves.may_keep_whole(error.path):
                raise
            return None
        except Exception:  # noqa: BLE001 - the model's own code refuses the size, in whatever way it likes
            return None

    def _merge_modes(self, pairs: Mapping[Size, tuple[int, int]]) -> dict[bool, TraceGraph]:
        corners = [dict(zip(pairs, numbers, strict=True)) for numbers in product(*pairs.values())]
        runs = {training: self._runs(training, corners) for training in (True, False)}
        for with_dtypes in (True, False):
            extra = {True: self._other_dtype(corners[0]) if with_dtypes else [], False: []}
            for modes in ([(True, False)], [(True,), (False,)]):
                try:
                    programs = {
                        group: generalize(
                            [run for mode in group for run in (*runs[mode], *extra[mode])], list(pairs)
                        )
                        for group in modes
                    }
                except NotRecordable as error:
                    failure = error
                    continue
                return {mode: program for group, program in programs.items() for mode in group}
        raise failure

    def _runs(
        self, training: bool, corners: Sequence[Mapping[Size, int]]
    ) -> list[tuple[Setting, TraceGraph]]:
        settings = [Setting(training, sizes) for sizes in corners]
        return [(setting, self._record(setting)) for setting in settings]

    def _other_dtype(self, sizes: Mapping[Size, int]) -> list[tuple[Setting, TraceGraph]]:
        """A recording in another dtype, which tells dtypes of tensors from constants; none if the model refuses."""
        setting = Setting(True, sizes, other_dtype=True)
        try:
            return [(setting, self._record(setting))]
        except Exception:  # noqa: BLE001 - the model's own code, given another dtype, may raise anything
            return []

    def _range(self, size: Size, numbers: tuple[int, int], given: Mapping[Size, int]) -> Range:
        """Try the smallest size and larger ones, until the model does something else or refuses them.

        At smaller sizes a model may leave out a function that has no effect there, such as a mask that masks nothing or
        an expansion to one row, so only the modules that it calls must be the same.
        """
        is_lenient = size.is_batch or self._sample.is_sequence(size)
        least = 1 if self._agrees({**given, size: 1}, only_modules=is_lenient) else min(numbers)
        if size.is_batch:
            return Range(least, None)
        longer = (max(4 * size.given, _LONG), 2 * size.given, size.given + 1) if size.given < _LONG else ()
        return Range(
            least, next((number for number in longer if self._agrees({**given, size: number})), size.given)
        )

    def _agrees(self, sizes: Mapping[Size, int], *, only_modules: bool = False) -> bool:
        """Whether the programs do what the model does at other sizes, in each mode in which it accepts them."""
        accepted = 0
        for training, program in self.programs.items():
            setting = Setting(training, sizes)
            try:
                recording = self._record(setting)
                (check_modules if only_modules else check)(program, setting, recording)
            except NotRecordable as error:
                self._disagreement = error
                return False
            except Exception:  # noqa: BLE001 - the model's own code refuses the size, in whatever way it likes
                continue
            accepted += 1
        return accepted > 0

    def _check_side_effects(self, setting: Setting) -> None:
        """Refuse a module that counts or collects something in Python: layers repeat what torch does, and no more.

        What a first call stores and a second one keeps is a cache, which layers do without.
        """
        states = []
        with attributes_restored(self._model):
            for _ in range(2):
                with suppress(
                    NotRecordable
                ):  # the second call may use a tensor that the first one has cached
                    self._run(setting)
                states.append(self._python_state())
        for (path, name), value in states[1].items():
            if states[0].get((path, name), value) != value:
                raise NotRecordable(
                    path,
                    None,
                    f"every call changes its attribute '{name}', which layers do not repeat; keep such a state in a "
                    "buffer, and write it in place",
                )

    def _python_state(self) -> dict[tuple[str, str], Any]:
        """The numbers and texts in attributes of modules that do not stay whole, and the lengths of containers."""
        return {
            (path, name): value if isinstance(value, int | float | str) else len(value)
            for path, module in self._model.named_modules()
            if self._leaves.outermost(path) is None
            for name, value in vars(module).items()
            if isinstance(value, int | float | str | list | dict | set)
        }

    def _record(self, setting: Setting) -> TraceGraph:
        sizes = {size: number for size, number in setting.sizes.items() if number != size.given}
        key = (setting.training, setting.other_dtype, *sizes.items())
        if key not in self._recordings:
            with attributes_restored(self._model):
                self._recordings[key] = self._run(setting)
        return self._recordings[key]

    def _run(self, setting: Setting) -> TraceGraph:
        inputs = self._sample.resized(setting.sizes, setting.other_dtype)
        substitutes = self._substitutes[setting.other_dtype]
        model = self._model.train(setting.training)
        try:
            return record(model, substitutes, self._leaves, inputs, self._results)
        except (NotRecordable, ConfigError):
            raise
        except Exception as error:
            raise ConfigError(self._input_error(error, inputs, setting.training)) from error

    def _input_error(self, error: Exception, inputs: SampleArguments, training: bool) -> str:
        path = next(iter(getattr(error, "__notes__", ())), "")
        where = f"'{path}'" if path else type(self._model).__name__
        reason = str(error).partition("\n")[0] or type(error).__name__
        mode = "training" if training else "evaluation"
        shapes = shapes_of(inputs.tensors.values())
        hint = "choose data that fits the model, which must accept any number of samples in training and evaluation"
        lacks_padding = getattr(getattr(self._model, "config", None), "pad_token_id", 0) is None
        if lacks_padding and "padding token" in reason:
            hint = "set pad_token_id in the model's configuration (config.json), to the token that your data pads with"
        line = SourceLine.raising(error) or SourceLine.defining(type(self._model).forward)
        return f"{where} does not accept an input of shape {shapes} in {mode}: {line}: {reason}; {hint}"

    def _refusal(self, error: NotRecordable) -> str:
        module = self._model.get_submodule(error.path)
        subject = f"'{error.path}' ({type(module).__name__})" if error.path else type(module).__name__
        line = error.line or SourceLine.defining(type(module).forward)
        where = "" if line is None else f"{line}: "
        return f"{subject} cannot be traced: {where}{error.reason}; {remedy(self._model, error.path)}"


@contextmanager
def attributes_restored(model: nn.Module) -> Iterator[None]:
    """Undo assignments to attributes, so that a forward that stores what it computes computes it again next time."""
    # Outer before inner ones: what is in a table of a module, such as its buffers, is restored after the table itself.
    tables = [table for module in model.modules() for table in _tables(module)]
    before = [(table, table.copy()) for table in tables]
    try:
        yield
    finally:
        for table, content in before:
            table.clear()
            (table.extend if isinstance(table, list) else table.update)(content)


def _tables(module: nn.Module) -> Iterator[Any]:
    """A module's attributes, and the dicts, lists and sets among them, such as that of its hooks."""
    yield vars(module)
    yield from (value for value in vars(module).values() if type(value) in (dict, OrderedDict, list, set))


@contextmanager
def modes_restored(*roots: nn.Module) -> Iterator[None]:
    modes = {module: module.training for root in roots for module in root.modules()}
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


@contextmanager
def caches_disabled(model: nn.Module) -> Iterator[None]:
    """Hugging Face models return a cache of keys and values unless their configurations say otherwise."""
    configs = {
        id(config): config for module in model.modules() if (config := getattr(module, "config", None))
    }
    caching = [config for config in configs.values() if getattr(config, "use_cache", False)]
    for config in caching:
        config.use_cache = False
    try:
        yield
    finally:
        for config in caching:
            config.use_cache = True
