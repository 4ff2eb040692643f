"""Train the tiny tokenizer that the fake backend, the tests and the tiny real model share: fake_backend/tiny.

Byte-level BPE with 4,096 tokens, learnt from the Python standard library's sources, and a ChatML template with tools.
The result is committed, because another Python has other sources: run this only to change it.

    python tests/real_vllm/make_tokenizer.py [DIRECTORY]
"""

from __future__ import annotations

import json
import sys
import sysconfig
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

VOCABULARY = 4096
PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CONTEXT = 8192

CHAT_TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\nTools:' }}
    {%- for tool in tools %}
        {{- '\\n' + (tool | tojson) }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role }}
    {%- if message.name %}
        {{- ' ' + message.name }}
    {%- endif %}
    {{- '\\n' + message.content }}
    {%- for call in message.tool_calls or [] %}
        {{- '\\n<call>' + call.function.name + ' ' + (call.function.arguments | tojson) + '</call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think></think>' }}
    {%- endif %}
{%- endif %}
"""


def train() -> Tokenizer:
    """Learn the merges. Every byte is in the alphabet, so any text survives encode and decode."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[AddedToken(t, special=True, normalized=False) for t in (PAD, START, END)],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train([str(p) for p in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:150]], trainer)
    return bpe


def main() -> None:
    here = Path(__file__).resolve().parents[2] / "fake_backend" / "tiny"
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else here
    out.mkdir(parents=True, exist_ok=True)
    bpe = train()
    assert bpe.get_vocab_size() == VOCABULARY
    bpe.save(str(out / "tokenizer.json"), pretty=False)
    (out / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    _write(
        out / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": END,
            "pad_token": PAD,
            "model_max_length": CONTEXT,
            "clean_up_tokenization_spaces": False,
        },
    )
    ids = {"eos_token_id": bpe.token_to_id(END), "pad_token_id": bpe.token_to_id(PAD)}
    _write(out / "generation_config.json", ids)
    _write(
        out / "config.json",
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": VOCABULARY,
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 64,
            "max_position_embeddings": CONTEXT,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "bos_token_id": None,
            **ids,
        },
    )


def _write(path: Path, value: dict[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
