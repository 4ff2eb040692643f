"""A small tekken.json for every version of mistral's chat format. Needs nothing but Python, as it is read in vLLM's
environment, too (tests/real_vllm/mistral_chats.py)."""

from __future__ import annotations

import base64
from typing import Any

VERSIONS = ("v3", "v7", "v11", "v13", "v15")
WORDS = [b"th", b"the", b" t", b" the", b"an", b"and", b"\xc3\xa9", b"ab", b"abc", b"bc", b"bcd", b"abcd", b"  ", b"<s"]
WORDS += [b"en", b"er", b"\n\n", b'":', b' "', b'{"', b'"}', b"us", b"user", b"ke", b"tent", b"con", b"content", b"IN"]
WORDS += [b"ST", b"INST", b"[INST", b"ame", b'"name', b"unc", b"unct", b"ion", b"function", b"we", b"wea"]
TOKENS = [bytes((b,)) for b in range(256)] + WORDS
PATTERN = r" ?[a-zA-Z]+| ?[^\sa-zA-Z]+|\s+"
SPECIAL = 60

_OLD = ("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]")
_OLD += ("[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]")
_OLD += ("[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]")
_NEW = (*_OLD, "[TRANSCRIBE]", "[AUDIO]", "[BEGIN_AUDIO]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]")
_NEW += ("[MODEL_SETTINGS]", "[/MODEL_SETTINGS]")


def tekken(version: str) -> dict[str, Any]:
    """The file's content. The first versions name no special tokens in it."""
    vocabulary = [
        {"rank": i, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for i, token in enumerate([*TOKENS, b"cut off"])
    ]
    whole: dict[str, Any] = {
        "config": {
            "pattern": PATTERN,
            "num_vocab_tokens": len(vocabulary),
            "default_vocab_size": SPECIAL + len(TOKENS),
            "default_num_special_tokens": SPECIAL,
            "version": version,
        },
        "vocab": vocabulary,
        "version": 1,
        "type": "Tekken",
    }
    if version not in ("v3", "v7"):
        whole["special_tokens"] = [{"rank": i, "token_str": t, "is_control": True} for i, t in enumerate(_NEW)]
    if version == "v15":
        efforts = {"type": "enum", "accepts_none": True, "default": "none", "values": ["none", "high"]}
        whole["model_settings_builder"] = {"reasoning_effort": efforts}
    return whole
