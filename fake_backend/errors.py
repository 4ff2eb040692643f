"""Errors in the shapes that vLLM's OpenAI server gives them (entrypoints/openai, vllm/exceptions.py)."""

import json
from http import HTTPStatus

JSON_HEADERS = (("content-type", "application/json"), ("vary", "Origin"))


class ApiError(Exception):
    """An answer with a status of 400 or more and ``{"error": {...}}`` as its body."""

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = "BadRequestError",
        param: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param

    def body(self) -> bytes:
        return compact({"error": self.detail()})

    def detail(self) -> dict[str, object]:
        return {"message": self.message, "type": self.kind, "param": self.param, "code": self.status}


class UnreadableBodyError(ApiError):
    """Bytes that starlette cannot make JSON of; the one error that keeps FastAPI's own shape."""

    def __init__(self) -> None:
        super().__init__(400, "There was an error parsing the body", "Bad Request")

    def body(self) -> bytes:
        return compact({"detail": self.message})


def compact(value: object) -> bytes:
    """JSON as starlette's JSONResponse writes it."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def without_surrogates(message: str) -> str:
    """The words of the tokenizers library for text that is no Unicode, which vLLM passes on."""
    if "surrogates" in message:
        return "TextEncodeInput must be Union[TextInputSequence, Tuple[InputSequence, InputSequence]]"
    return message


def bad_value(param: str, message: str, value: object) -> ApiError:
    """A value that the engine, not the schema, refuses (VLLMValidationError)."""
    return ApiError(400, f"{message} (parameter={param}, value={value})", "BadRequestError", param)


def unknown_model(name: str, known: list[str]) -> ApiError:
    message = f"The model `{name}` does not exist. Valid aliases: {', '.join(known)}."
    return ApiError(404, message, "NotFoundError", "model")


def too_long(limit: int, tokens: int, *, at_least: bool = False) -> ApiError:
    counted = f"at least {tokens}" if at_least else f"{tokens}"
    return bad_value(
        "input_tokens",
        f"This model's maximum context length is {limit} tokens. However, your prompt contains {counted} input tokens, "
        "which exceeds this limit even without any output tokens. Please reduce the length of the input prompt.",
        tokens,
    )


def no_room(limit: int) -> ApiError:
    return ApiError(
        400,
        f"The decoder prompt (length {limit}) plus the number of requested output tokens (at least 1) is longer than "
        f"the maximum model length of {limit}. Make sure that `max_model_len` is no smaller than the number of text "
        "tokens (prompt + requested output tokens).",
    )


def queue_full() -> ApiError:
    return ApiError(
        503,
        "The engine is currently busy and cannot accept new requests. Please try again later or on a different "
        "instance.",
        HTTPStatus(503).phrase,
    )


def backlog_full() -> ApiError:
    return ApiError(
        503,
        "The engine has reached its prefill token backlog limit. Please try again later or on a different instance.",
        HTTPStatus(503).phrase,
    )


def engine_failure() -> ApiError:
    return ApiError(500, "Internal server error", "InternalServerError")


def engine_dead() -> ApiError:
    message = "EngineCore encountered an issue. See stack trace (above) for the root cause."
    return ApiError(500, message, "InternalServerError")


def scale_out_disabled() -> ApiError:
    return ApiError(
        403,
        "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable them.",
        "PermissionDeniedError",
    )
