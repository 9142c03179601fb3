"""Directories of Hugging Face: what is loaded from them, and what is refused in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gpipe_cli import huggingface
from gpipe_cli.errors import ConfigError, GpipeError, RunError


def directory(path: Path, content: Any = None, text: str | None = None) -> Path:
    path.mkdir()
    if content is not None or text is not None:
        (path / "config.json").write_text(json.dumps(content) if text is None else text)
    return path


def test_a_configuration_has_the_class_of_its_architecture(tmp_path: Path) -> None:
    config = huggingface.load_config(
        directory(tmp_path / "llama", {"model_type": "llama", "hidden_size": 64})
    )
    assert type(config).__name__ == "LlamaConfig" and config.hidden_size == 64


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        (None, ConfigError, "has no config.json"),
        ("{", RunError, "config.json: damaged or unreadable"),
        ("[]", RunError, "contains a list instead of an object"),
        (
            '{"model_type": "lama"}',
            ConfigError,
            "has no architecture with model_type=lama; did you mean 'llama'?",
        ),
        ("{}", ConfigError, "has no architecture with model_type=None"),
        ('{"model_type": "llama", "auto_map": {}}', ConfigError, r"asks for code of its own \(auto_map\)"),
        (
            '{"model_type": "llava", "text_config": {"auto_map": {}}}',
            ConfigError,
            r"asks for code of its own \(text_config.auto_map\)",
        ),
        (
            '{"model_type": "llama", "hidden_size": "x"}',
            ConfigError,
            "config.json does not describe a llama: .*'hidden_size' expected int, got str",
        ),
    ],
)
def test_bad_configurations_are_refused(
    tmp_path: Path, content: str | None, error: type[GpipeError], message: str
) -> None:
    path = directory(tmp_path / "bad", text=content)
    with pytest.raises(error, match=message) as raised:
        huggingface.load_config(path)
    assert "\n" not in str(raised.value)


def test_the_name_of_a_hub_is_no_directory() -> None:
    with pytest.raises(
        ConfigError, match=r"model\.path=meta-llama/Llama-3: no such directory; gpipe downloads nothing"
    ):
        huggingface.load_config(Path("meta-llama/Llama-3"))


def test_a_missing_package_is_named_with_the_command_that_installs_it() -> None:
    with pytest.raises(
        ConfigError, match=r"no_such_package cannot be imported .*pip install 'transformers>=5' tokenizers"
    ):
        huggingface.import_package("no_such_package")


def test_a_directory_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    path = directory(tmp_path / "llama", {"model_type": "llama"})
    with pytest.raises(ConfigError, match=r"data\.tokenizer=.*: has no tokenizer that transformers can load"):
        huggingface.load_tokenizer(path)
