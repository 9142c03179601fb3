"""Models of Hugging Face and timm, traced and in a pipe, have the bits of the originals.

By default a training step of a few architectures; `-m slow` compares all of them as `python -m benchmarks.models` does.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.models import huggingface, timm_families
from benchmarks.models.compare import prove, prove_in_a_pipe
from benchmarks.models.exceptions import EXCEPTIONS
from benchmarks.models.subject import Subject

FEW = [
    ("gpt2", "causal_lm", torch.float64),  # tied embeddings
    ("olmoe", "causal_lm", torch.float32),  # experts
    ("albert", "masked_lm", torch.float64),  # shared layers
]
ALL = [*huggingface.subjects(), *timm_families.subjects()]


@pytest.mark.parametrize(("name", "task", "dtype"), FEW, ids=[f"{name}-{task}" for name, task, _ in FEW])
def test_a_step_of_a_hugging_face_model_in_a_pipe_has_the_bits_of_the_original(
    name: str, task: str, dtype: torch.dtype
) -> None:
    subject = huggingface.subject(name, task)
    prove_in_a_pipe(subject, subject.batches()[0], dtype)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("subject", ALL, ids=lambda subject: f"{subject.name}-{subject.task}")
def test_a_traced_model_is_the_original(subject: Subject) -> None:
    if reason := EXCEPTIONS.get((subject.name, subject.task)):
        pytest.skip(reason)
    prove(subject)


def test_there_is_a_model_of_every_family_of_timm_and_of_forty_architectures() -> None:
    assert list(timm_families.SMALLEST) == timm_families.timm.list_modules()
    assert len({subject.name for subject in huggingface.subjects()}) >= 40
    known = {(subject.name, subject.task) for subject in ALL}
    assert EXCEPTIONS.keys() <= known and len(EXCEPTIONS) <= len(known) / 20


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_it_is_the_smallest_of_its_family() -> None:
    assert {
        module: timm_families.smallest(module) for module in timm_families.SMALLEST
    } == timm_families.SMALLEST


@pytest.mark.slow
def test_the_command_prints_the_score_and_writes_the_results(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    command = f"{sys.executable} -m benchmarks.models --only test_vit --only test_resnet --json {results}"
    process = subprocess.run(command.split(), capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    assert "timm: 2 of 2 to the bit" in process.stdout
    assert [row["failure"] for row in json.loads(results.read_text())] == [None, None]
