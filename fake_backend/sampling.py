"""The part of a body that chat, completions and generate share: sampling parameters, headers, identities."""

import math
import secrets
from dataclasses import dataclass

from fake_backend import errors
from fake_backend.answers import Wish
from fake_backend.replica import Job, Replica
from fake_backend.validate import Fields
from fake_backend.wire import Request

MAX_SALT = 128
MAX_ANSWERS = 16384
MAX_LOGPROBS = 20


@dataclass(frozen=True, slots=True)
class StreamOptions:
    stream: bool
    usage_at_end: bool
    usage_always: bool


def request_id(prefix: str, request: Request, fields: Fields) -> str:
    """``chatcmpl-<X-Request-Id>`` or sixteen random hex digits, as vLLM makes it."""
    given = request.headers.get("x-request-id") or fields.text("request_id")
    return f"{prefix}-{given or secrets.token_hex(8)}"


def stream_options(fields: Fields, *, force_usage: bool) -> StreamOptions:
    stream = fields.flag("stream")
    options = fields.mapping("stream_options")
    if options and not stream:
        raise errors.ApiError(
            400,
            "1 validation error:\n  {'type': 'value_error', 'loc': 'body', 'msg': 'Value error, Stream options can "
            "only be defined when `stream=True`.'}",
            "Bad Request",
            "stream_options",
        )
    inner = Fields(dict(options or {}), "body.stream_options")
    at_end = inner.flag("include_usage") or force_usage
    return StreamOptions(stream, at_end, at_end and inner.flag("continuous_usage_stats"))


def _stops(fields: Fields) -> tuple[str, ...]:
    stop = fields.body.get("stop")
    if stop is None:
        return ()
    if isinstance(stop, str):
        return (stop,)
    if isinstance(stop, list) and all(isinstance(item, str) for item in stop):
        if any(not item for item in stop):
            raise errors.ApiError(400, "stop cannot contain an empty string.")
        return tuple(stop)
    fields.text("stop")
    return ()


def check_sampling(fields: Fields) -> None:
    """The checks of vLLM's SamplingParams (sampling_params.py) that need no sampler."""
    fields.bounded("seed", -(2**63), 2**63 - 1)
    temperature = fields.number("temperature")
    if temperature is not None and not math.isfinite(temperature):
        raise errors.bad_value("temperature", f"temperature must be a finite number, got {temperature}.", temperature)
    if temperature is not None and temperature < 0:
        message = f"temperature must be non-negative, got {float(temperature)}."
        raise errors.bad_value("temperature", message, float(temperature))
    top_p = fields.number("top_p")
    if top_p is not None and not 0 < top_p <= 1:
        raise errors.bad_value("top_p", f"top_p must be in (0, 1], got {float(top_p)}.", float(top_p))
    for name in ("presence_penalty", "frequency_penalty"):
        penalty = fields.number(name)
        if penalty is not None and not -2 <= penalty <= 2:
            raise errors.ApiError(400, f"{name} must be in [-2, 2], got {float(penalty)}.")
    top_k = fields.integer("top_k")
    if top_k is not None and top_k < -1:
        raise errors.ApiError(400, f"top_k must be 0 (disable), or at least 1, got {top_k}.")
    # Chat's `logprobs` is a flag, completions' a number; `top_logprobs` is chat's.
    logprobs = fields.body.get("logprobs")
    for wanted in (fields.integer("top_logprobs"), None if isinstance(logprobs, bool) else fields.integer("logprobs")):
        if wanted is not None and wanted < -1:
            raise errors.bad_value("logprobs", f"logprobs must be non-negative or -1, got {wanted}.", wanted)
        if wanted is not None and wanted > MAX_LOGPROBS:
            message = f"Requested sample logprobs of {wanted}, which is greater than max allowed: {MAX_LOGPROBS}"
            raise errors.bad_value("logprobs", message, wanted)
    n = fields.integer("n")
    if n is not None and n < 1:
        raise errors.ApiError(400, f"n must be at least 1, got {n}.")
    if n is not None and n > MAX_ANSWERS:
        raise errors.ApiError(
            400,
            f"n must be at most {MAX_ANSWERS}, got {n}. To increase this limit, set the VLLM_MAX_N_SEQUENCES "
            "environment variable.",
        )
    if n is not None and n > 1 and temperature == 0:
        raise errors.ApiError(400, f"n must be 1 when using greedy sampling, got {n}.")


def given_answers(fields: Fields, vocabulary: int) -> tuple[tuple[int, ...], ...] | None:
    """``vllm_xargs.fake_answer_token_ids``: what the model is to say, as ids, or as a list of ids for each answer.

    A real replica takes any vllm_xargs and ignores what it doesn't know.
    """
    given = (fields.mapping("vllm_xargs") or {}).get("fake_answer_token_ids")
    if not isinstance(given, list) or not given:
        return None
    answers = given if all(isinstance(item, list) and item for item in given) else [given]
    for answer in answers:
        if not all(isinstance(token, int) and 0 <= token < vocabulary for token in answer):
            raise errors.ApiError(400, "fake_answer_token_ids must be ids of the vocabulary, or lists of them")
    return tuple(tuple(answer) for answer in answers)


def wish(
    fields: Fields, replica: Replica, prompt_ids: list[int], asked: int | None, echo: tuple[int, ...] | None
) -> Wish:
    """What the body wants of the answer; ``asked`` are its max_tokens, clipped to what the context leaves."""
    if asked is not None and asked < 1:
        raise errors.bad_value("max_tokens", f"max_tokens must be at least 1, got {asked}.", asked)
    room = replica.settings.max_model_len - len(prompt_ids)
    most = room if asked is None else min(asked, room)
    least = fields.integer("min_tokens") or 0
    if least < 0:
        raise errors.ApiError(400, f"min_tokens must be greater than or equal to 0, got {least}.")
    if least > most:
        message = f"min_tokens must be less than or equal to max_tokens={most}, got {least}."
        raise errors.ApiError(400, message)
    return Wish(
        max_tokens=most,
        min_tokens=least,
        ignore_eos=fields.flag("ignore_eos"),
        stop=_stops(fields),
        stop_token_ids=tuple(fields.array("stop_token_ids") or ()),
        include_stop=fields.flag("include_stop_str_in_output"),
        seed=fields.integer("seed"),
        given=given_answers(fields, replica.tokenizer.vocab_size),
        echo=echo,
    )


def _salt_fault(salt: str) -> str:
    """What is wrong with a cache_salt, if anything (vLLM entrypoints/generate/base/protocol.py)."""
    if not salt:
        return "must be a non-empty string if provided."
    if len(salt) > MAX_SALT:
        return f"must be at most {MAX_SALT} characters."
    if any(character in salt for character in "@/\\\0"):
        return "must not contain '@', '/', a backslash or NUL."
    return ""


def _number(request: Request, header: str) -> int | None:
    """A header that is a number; any other value is ignored."""
    try:
        return int(request.headers.get(header, ""))
    except ValueError:
        return None


def job(identity: str, fields: Fields, request: Request, replica: Replica, prompt_ids: list[int], wanted: Wish) -> Job:
    """A job for one prompt, with what headers and body say of it. Raises ApiError."""
    salt = fields.text("cache_salt")
    if salt is not None and _salt_fault(salt):
        raise errors.ApiError(
            400, f"Parameter 'cache_salt' {_salt_fault(salt)} (parameter=cache_salt)", param="cache_salt"
        )
    rank = _number(request, "x-data-parallel-rank")
    replica.check_rank(rank)
    priority = _number(request, "x-vllm-priority")
    if priority is None:
        priority = fields.integer("priority") or 0
    transfer = fields.mapping("kv_transfer_params")
    return Job(
        identity,
        prompt_ids,
        wanted,
        lora=replica.adapter(fields.text("model")),
        cache_salt=salt,
        priority=priority,
        reads_cache=fields.integer("prompt_logprobs") is None,
        n=fields.integer("n") or 1,
        session_id=fields.text("session_id") or request.headers.get("x-session-id"),
        rank=rank,
        transfer=transfer,
    )
