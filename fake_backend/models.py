"""The models whose size and shape are known, and how to read another from its config.json."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any


class ModelError(Exception):
    """A model that is not known, or a config.json that does not say enough; one clear line."""


@dataclass(frozen=True, slots=True)
class Model:
    """What the budget and the step time need to know."""

    name: str
    parameters: float
    layers: int
    kv_layers: int
    """Layers that keep KV for every token; linear-attention, Mamba and sliding-window layers don't."""
    query_heads: int
    kv_heads: int
    head_size: int
    context: int
    """Native maximum length in tokens."""
    active_parameters: float = 0.0
    """Parameters that one token uses; 0: all of them."""
    quantization: str = "none"
    """Format the weights are published in."""

    @property
    def active(self) -> float:
        return self.active_parameters or self.parameters


MODELS: Mapping[str, Model] = {
    model.name: model
    for model in (
        Model("Llama-3.1-8B", 8.03e9, 32, 32, 32, 8, 128, 131072),
        Model("Llama-3-70B", 70.6e9, 80, 80, 64, 8, 128, 8192),
        Model("Llama-3.1-70B", 70.6e9, 80, 80, 64, 8, 128, 131072),
        Model("Qwen3-0.6B", 0.6e9, 28, 28, 16, 8, 128, 40960),
        Model("Qwen3-32B", 32.8e9, 64, 64, 64, 8, 128, 40960),
        Model("Qwen3-30B-A3B", 30.5e9, 48, 48, 32, 4, 128, 40960, active_parameters=3.3e9),
        Model("Qwen3.5-27B", 27.0e9, 64, 16, 24, 4, 256, 262144),
        Model("gpt-oss-120b", 116.8e9, 36, 18, 64, 8, 64, 131072, active_parameters=5.1e9, quantization="mxfp4"),
    )
}
DEFAULT_MODEL = "Llama-3.1-8B"


def find(name: str) -> Model | None:
    """The preset that a name means, whoever's repository it is in: ``Qwen/Qwen3-32B``, ``Llama-3.1-8B-Instruct``."""
    wanted = name.rsplit("/", 1)[-1].lower()
    wanted = wanted.removeprefix("meta-").removesuffix("-instruct")
    return next((model for known, model in MODELS.items() if known.lower() == wanted), None)


def from_config(name: str, config: Mapping[str, Any], weight_bytes: int | None = None) -> Model:
    """A model from its Hugging Face config.json; ``weight_bytes`` of its weight files, if they are there.

    Raises ModelError naming the missing key.
    """
    text = config.get("text_config", config)

    def number(key: str, default: int | None = None) -> int:
        value = text.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise ModelError(f"{name}: config.json has no usable {key!r}")
        return value

    layers, hidden, heads = number("num_hidden_layers"), number("hidden_size"), number("num_attention_heads")
    kv_heads = number("num_key_value_heads", heads)
    head_size = number("head_dim", hidden // heads)
    kinds = text.get("layer_types")
    kv_layers = layers
    if isinstance(kinds, list) and kinds:
        kv_layers = sum(1 for kind in kinds if kind == "full_attention")
    vocabulary, inner = number("vocab_size"), number("intermediate_size", 4 * hidden)
    attention = hidden * head_size * (2 * heads + 2 * kv_heads)
    experts = int(text.get("num_local_experts") or text.get("num_experts") or 1)
    per_token = int(text.get("num_experts_per_tok") or 1)
    if experts > 1:
        inner = int(text.get("moe_intermediate_size") or inner)
    embeddings = vocabulary * hidden * (1 if text.get("tie_word_embeddings") else 2)
    parameters = float(embeddings + layers * (attention + experts * 3 * hidden * inner))
    active = float(embeddings + layers * (attention + per_token * 3 * hidden * inner))
    if weight_bytes:
        active *= weight_bytes / 2 / parameters
        parameters = weight_bytes / 2
    return Model(
        name, parameters, layers, kv_layers, heads, kv_heads, head_size,
        number("max_position_embeddings"), active_parameters=active if experts > 1 else 0.0,
    )  # fmt: skip


def named(model: Model, name: str) -> Model:
    return replace(model, name=name)
