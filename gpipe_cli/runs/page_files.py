"""What a training run writes for its page besides metrics, and the page itself during the run.

    layers.json       the layers with their partitions and, where a balance method measured them, their times
    trace.json        one early step, every action of it, and the predicted step where the times are known
    timeline.json     how busy the partitions were in that step
    predictions.json  with log.predictions=true: which class the last evaluation of a classifier took for which, and
                      some samples; the process with the last layer counts, and rank 0 adds the inputs
    sample.json       with log.predictions=true: what a language model wrote at the end of the run

None of it changes a result, and a failure costs one line of output.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar, final

from gpipe_cli.balance.time import partition_costs
from gpipe_cli.build.parts import RunParts
from gpipe_cli.build.recorded_steps import partition_times
from gpipe_cli.config.schema import TrainConfig
from gpipe_cli.distributed.world import World
from gpipe_cli.engines.protocol import Engine
from gpipe_cli.errors import ConfigError, ResourceError
from gpipe_cli.inference.generation import Sampling, TextFormat, TextStream, generate
from gpipe_cli.profiling.records import frozen_layers, parameter_count
from gpipe_cli.profiling.timeline import StepTimeline
from gpipe_cli.report.formatting import describe
from gpipe_cli.report.output import print_status
from gpipe_cli.report.page.render import PAGE, render_page
from gpipe_cli.report.page.run_record import read_run
from gpipe_cli.report.trace import trace_json
from gpipe_cli.runs.confusion_matrix import EvalObserver, predictions_json
from gpipe_cli.runs.directory import write_json, write_text
from gpipe_cli.sequential import layer_class, layer_names
from gpipe_cli.training.loop import EvalResult, StepResult

LAYERS, TRACE, TIMELINE = "layers.json", "trace.json", "timeline.json"
PREDICTIONS, SAMPLE = "predictions.json", "sample.json"
MIN_SECONDS = 10.0
"""The least time between two pages that are written during a run."""
MAX_SHARE = 0.02
"""The share of the time that may go into these pages: reading a long metrics.jsonl takes a while."""
PROMPT_TOKENS, NEW_TOKENS, SECONDS = 16, 120, 5.0
TEMPERATURE, TOP_K = 0.8, 40


Fact = TypeVar("Fact")


@final
class RunPage:
    """Follows a run on every rank; rank 0 writes the files."""

    def __init__(self, settings: TrainConfig, parts: RunParts, world: World) -> None:
        """Call it before the engine takes the model: afterwards a rank may have only its own layers."""
        self._settings, self._parts, self._world = settings, parts, world
        self._layers = layer_facts(parts) if world.is_rank_zero else []
        self._directory = Path()
        self._print_status: Callable[[str], None] = print_status
        self._due = 0.0
        self._lacking: set[str] = set()
        self.observer = EvalObserver(parts.loader) if settings.log.predictions else None
        """What the engine shows its evaluations to, if anything."""

    def begin(self, directory: Path, print_status: Callable[[str], None]) -> None:
        """Write what is known before the first step."""
        self._directory, self._print_status = directory, print_status
        if self._world.is_rank_zero:
            with suppress(OSError):
                for name in (TRACE, TIMELINE):  # of an earlier launch, which may have had other partitions
                    (directory / name).unlink(missing_ok=True)
            self._write("the layers", LAYERS, lambda: {"layers": self._layers})

    def follow(self, facts: Iterable[Fact]) -> Iterator[Fact]:
        """Pass the facts of the training loop on, and write what they tell."""
        for fact in facts:
            is_news = False
            if isinstance(fact, EvalResult):
                self._evaluated(fact)
                is_news = True
            elif isinstance(fact, StepResult) and fact.timeline is not None:
                self._recorded(fact.step, fact.timeline)
                is_news = True
            yield fact
            # Only now has the recorder written the row of this fact.
            if is_news and self._world.is_rank_zero:
                self._refresh()

    def end(self, engine: Engine) -> None:
        """Write what a language model makes of a prompt."""
        if not self._settings.log.predictions or self._parts.loader.data.tokenizer is None:
            return
        if self._world.size > 1:
            return  # if one rank failed here, the others would wait for it
        self._write("generated text", SAMPLE, lambda: text_sample(engine, self._parts, self._settings.seed))

    def _evaluated(self, fact: EvalResult) -> None:
        observed = None if self.observer is None else self.observer.take(self._world)
        if observed is not None and self._world.is_rank_zero:
            loader = self._parts.loader
            self._write("predictions", PREDICTIONS, lambda: predictions_json(observed, loader, fact.step))

    def _recorded(self, step: int, timeline: StepTimeline) -> None:
        if self._world.is_rank_zero:
            self._write("the recorded step", TIMELINE, lambda: self._write_step(step, timeline))

    def _refresh(self) -> None:
        """Write the page if the last one is old enough."""
        began = time.monotonic()
        if began >= self._due:
            with suppress(Exception):  # the run writes the page again at its end, and reports what is wrong
                write_text(self._directory / PAGE, render_page([read_run(self._directory)]))
            self._due = began + max(MIN_SECONDS, (time.monotonic() - began) / MAX_SHARE)

    def _write(self, what: str, name: str, content: Callable[[], dict[str, Any] | None]) -> None:
        """what: what the page lacks if that fails, which is said once."""
        try:
            if (facts := content()) is not None:
                write_json(self._directory / name, facts)
        except ResourceError:
            pass  # the disk is full: the recorder warns of that, and the results matter more than a page
        except Exception as error:  # noqa: BLE001 - a page must not end a training
            if what not in self._lacking:
                self._print_status(f"warning: the page of the run will lack {what}: {describe(error)}")
            self._lacking.add(what)

    def _write_step(self, step: int, timeline: StepTimeline) -> dict[str, Any]:
        """Write the trace; return how busy the partitions were."""
        partitions = {span.action.partition for span in timeline.spans}
        partitioning = self._parts.partitioning
        ideal = None
        facts: dict[str, Any] = {"step": step, "bubble": timeline.bubble}
        if partitioning.balanced.unit == "ms" and partitioning.balanced.phases:
            frozen = frozen_layers(self._parts.model)
            costs = partition_costs(partitioning.balanced.phases, partitioning.balance, frozen)
            simulation = partitioning.spec.simulate(costs)
            ideal = StepTimeline.simulated(simulation)
            facts |= {"ideal_step_ms": simulation.step, "ideal_bubble": simulation.bubble}
        if len(partitions) == len(partitioning.balance):
            rows = [f"partition {row['partition']} ({row['device']})" for row in self._parts.partitions]
            facts["partitions"] = [partition_times(timeline, index) for index in sorted(partitions)]
        else:  # the slices of an engine without partitions, which are no rows of the table of partitions
            rows = [f"slice {index}" for index in sorted(partitions)]
        write_text(self._directory / TRACE, trace_json([timeline], ideal, rows))
        return facts


def layer_facts(parts: RunParts) -> list[dict[str, Any]]:
    """What is known of each layer without running anything."""
    partitioning = parts.partitioning
    ends, phases = list(accumulate(partitioning.balance)), partitioning.balanced.phases
    unit = {"ms": "ms", "FLOPs": "flops"}.get(partitioning.balanced.unit)
    rows = []
    for index, (name, layer) in enumerate(zip(layer_names(parts.model), parts.model, strict=True)):
        parameters = list(layer.parameters())
        row: dict[str, Any] = {
            "name": name,
            "type": layer_class(layer),
            "partition": sum(index >= end for end in ends),
            "parameters": parameter_count(layer),
            "parameter_bytes": sum(parameter.numel() * parameter.element_size() for parameter in parameters),
            "frozen": bool(parameters) and not any(parameter.requires_grad for parameter in parameters),
        }
        if phases and unit is not None:
            row |= {
                f"forward_{unit}": phases[index].forward_ms,
                f"backward_{unit}": phases[index].backward_ms,
                "source": phases[index].source,
            }
        rows.append(row)
    return rows


def text_sample(engine: Engine, parts: RunParts, seed: int) -> dict[str, Any] | None:
    """Let a language model continue the beginning of a held-out text, for a few seconds; None if it cannot."""
    try:
        text = TextFormat.of(parts.loader)
        prompt = _prompt(parts)
        stream = TextStream(text.tokenizer, prompt)
        until = time.monotonic() + SECONDS
        for token in generate(engine, text, prompt, NEW_TOKENS, Sampling(TEMPERATURE, TOP_K, seed)):
            stream.add(token)
            if time.monotonic() > until:
                break
    except ConfigError:  # the model is no causal language model
        return None
    stream.end()
    sampling = {"temperature": TEMPERATURE, "top_k": TOP_K, "seed": seed}
    return {
        "prompt": text.tokenizer.decode(prompt),
        "text": stream.text,
        "tokens": len(stream.tokens),
        **sampling,
    }


def _prompt(parts: RunParts) -> list[int]:
    input = parts.loader.eval_samples[0][0]
    tokens = input["input_ids"] if isinstance(input, dict) else input
    return [int(token) for token in tokens[:PROMPT_TOKENS]]
