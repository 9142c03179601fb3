"""gpipe generate: continue a text with a trained language model, token by token."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from gpipe_cli.config.job import Job, Summary
from gpipe_cli.config.schema import GenerateConfig
from gpipe_cli.config.words import sets_key
from gpipe_cli.errors import ConfigError
from gpipe_cli.huggingface import read_config
from gpipe_cli.inference.generation import Sampling, TextFormat, TextStream, generate
from gpipe_cli.inference.trained import TrainedModel, use_trained, with_saved_settings
from gpipe_cli.report.output import print_status, print_text

STDIN = "-"
MAX_PROMPT_BYTES = 2**24
MAX_CONTEXT = 1024
"""Tokens that the model of a directory sees, unless data.context gives another number; more take longer."""


def run(settings: GenerateConfig, job: Job) -> Summary:
    is_directory = settings.run is settings.snapshot is settings.weights is None
    if is_directory and not sets_key(job.overrides, "data.context"):
        settings = replace(settings, data={**settings.data, "context": _context(settings.model["path"])})
    with use_trained(with_saved_settings(settings, job), job) as trained:
        return _generate(trained)


def _context(directory: str) -> int:
    """How many tokens the model in a directory sees."""
    content = read_config(Path(directory))
    known = content.get("max_position_embeddings", content.get("n_positions"))
    return min(known, MAX_CONTEXT) if isinstance(known, int) and known > 0 else MAX_CONTEXT


def _generate(trained: TrainedModel[GenerateConfig]) -> Summary:
    settings, world = trained.settings, trained.world
    parts = trained.build()
    text = TextFormat.of(parts.loader, settings.chat)
    if (summary := trained.run_elsewhere(parts)) is not None:
        return summary
    given = _read_prompt(settings.prompt) if world.is_rank_zero else ""
    prompt = world.from_rank_zero(text.encode(given) if world.is_rank_zero else None)
    context = text.context
    if len(prompt) > context and world.is_rank_zero:
        print_status(
            f"the prompt has {len(prompt)} tokens; the model takes {context}, so it sees the last {context}"
        )
    stream = TextStream(text.tokenizer, prompt)
    sampling = Sampling(settings.temperature, settings.top_k, settings.seed)
    shows = world.is_rank_zero and not trained.job.json
    with trained.engine(parts) as (engine, stops):
        began = time.perf_counter()
        new = generate(engine, text, prompt, settings.tokens, sampling)
        _print(stream, stops.until_stopped(new), shows=shows)
    seconds = time.perf_counter() - began
    count = len(stream.tokens)
    ended = stream.tokens[-1] in text.ends
    if shows:
        reason = ", where the text ends" if ended else ""
        print_status(f"{count} tokens in {seconds:.1f} s ({count / seconds:.1f} tokens/s){reason}")
    return {
        "prompt": given,
        "text": stream.text,
        "tokens": count,
        "ended": ended,
        "prompt_tokens": len(prompt),
        "tokens_per_second": count / seconds,
        "seconds": seconds,
        **trained.source,
    }


def _print(stream: TextStream, tokens: Iterator[int], *, shows: bool) -> None:
    """Add the tokens to the stream, and print each piece of text as soon as it is complete."""
    write = print_text if shows else lambda text: None
    try:
        for token in tokens:
            write(stream.add(token))
    finally:
        if stream.tokens:  # an error before the first token leaves stdout empty
            write(f"{stream.end()}\n")


def _read_prompt(prompt: str) -> str:
    if prompt != STDIN or sys.stdin is None:  # None: the command was started without stdin
        return "" if prompt == STDIN else prompt
    if sys.stdin.isatty():
        print_status("reading the prompt from the terminal; end it with Ctrl-D")
    content = sys.stdin.buffer.read(MAX_PROMPT_BYTES + 1)
    if len(content) > MAX_PROMPT_BYTES:
        raise ConfigError(
            f"prompt=-: stdin has more than {MAX_PROMPT_BYTES} bytes; give the end of the text only"
        )
    # As the shell does with $(...): the last line break belongs to the file, not to the text.
    return content.decode(errors="surrogateescape").removesuffix("\n")
