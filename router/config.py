"""Every setting there is: its type, its default, why that default, and where it may come from.

One typed tree. Values come from, in rising order: the defaults here, a YAML file (--config), the environment
(WARMROUTE_<NAME>), the command line (--<name>). Leaf names are unique, so a flag needs no section name.
`python -m router.config` prints this page as docs/settings.md.
"""

from __future__ import annotations

import difflib
import os
import re
import typing
from dataclasses import dataclass
from typing import Annotated, Any
from urllib.parse import urlsplit

import msgspec
import yaml
from msgspec import Meta

if typing.TYPE_CHECKING:
    from pathlib import Path

ENV_PREFIX = "WARMROUTE_"
CONFIG_ENV = "WARMROUTE_CONFIG"
"""Names the settings file, as --config does."""

_WORDS = {"yes": True, "on": True, "no": False, "off": False}
"""What people write for true and false, besides these words and 1 and 0."""


class ConfigError(Exception):
    """A setting is wrong. The message is one line, names the setting, and says what would be right."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a replica listens. `base` goes before every path; "" for most."""

    host: str
    port: int
    tls: bool
    base: str

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def name(self) -> str:
        """What its replica is called."""
        return self.authority + self.base

    @property
    def url(self) -> str:
        return f"{'https' if self.tls else 'http'}://{self.authority}{self.base}"


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A named group of settings."""


class Listen(Section, frozen=True):
    """The clients' side."""

    host: Annotated[str, Meta(description="Address to listen on. Loopback: being reachable is a choice.")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="Port to listen on; 0 takes a free one.")] = 8080
    workers: Annotated[
        int,
        Meta(
            ge=1,
            le=256,
            description="Processes that serve the port together, one a core at the most: one carries some thousand "
            "requests a second. They tell each other what they know, or share it through `redis`.",
        ),
    ] = 1
    max_body_bytes: Annotated[
        int, Meta(ge=1024, description="Largest request body. 64 MiB holds a 1M-token prompt or a few large images.")
    ] = 64 * 1024 * 1024
    max_buffered_bytes: Annotated[
        int, Meta(ge=1024, description="Request bodies held at one time, of all clients together; beyond it: 503.")
    ] = 1024 * 1024 * 1024
    max_header_bytes: Annotated[
        int, Meta(ge=1024, description="Request line and headers together; common servers allow 8 to 64 KiB.")
    ] = 64 * 1024
    max_headers: Annotated[int, Meta(ge=8, description="Header lines in a request; browsers send about 20.")] = 128
    max_connections: Annotated[
        int, Meta(ge=1, description="Client connections at one time; an idle one costs about 5 KB.")
    ] = 20_000
    header_timeout_seconds: Annotated[
        float,
        Meta(gt=0, description="Longest time for a request's headers to arrive whole; against clients that trickle."),
    ] = 30.0
    body_timeout_seconds: Annotated[float, Meta(gt=0, description="Longest pause while a body arrives.")] = 60.0
    keep_alive_seconds: Annotated[
        float, Meta(gt=0, description="An idle client connection is closed after this; above common clients' own.")
    ] = 75.0
    sse_keep_alive_seconds: Annotated[
        float,
        Meta(
            ge=0,
            description="A streamed answer that pauses so long, as in a long prefill, is given a comment, which "
            "clients pass over: proxies in between cut what is idle, and 15 suits most. 0: never; a replica can do so "
            "itself (vLLM's --sse-keep-alive-interval).",
        ),
    ] = 0.0
    drain_seconds: Annotated[
        float, Meta(ge=0, description="On SIGTERM, how long running answers may go on before they are cut.")
    ] = 30.0
    grace_seconds: Annotated[
        float,
        Meta(
            ge=0,
            description="On SIGTERM, how long requests are still taken while /ready already says no: load balancers "
            "need a moment to look elsewhere.",
        ),
    ] = 2.0
    client_keys_file: Annotated[
        str,
        Meta(
            description="File of the clients' API keys, one on each line, as it is or as NAME:SHA256. Who has none is "
            "told 401; a key ends here and is not passed on. Unset: all may enter, and keys are the replicas' to judge."
        ),
    ] = ""
    max_connections_per_address: Annotated[
        int,
        Meta(
            ge=0,
            description="Connections from one address (of IPv6: one /64), in each worker; beyond it: 429. 0 sets no "
            "bound, for behind a proxy or load balancer all come from one.",
        ),
    ] = 0
    tls_cert_file: Annotated[
        str, Meta(description="Certificate to show clients, with its chain, in PEM. Unset: plain HTTP.")
    ] = ""
    tls_key_file: Annotated[
        str, Meta(description="Its private key, without a password. Unset: the key lies in `tls_cert_file` too.")
    ] = ""
    tls_client_ca_file: Annotated[
        str,
        Meta(description="Certificates that vouch for clients: only who shows one of theirs may connect (mutual TLS)."),
    ] = ""
    show_choice: Annotated[
        bool,
        Meta(description="Add x-warmroute-replica and x-warmroute-predicted-tokens to answers."),
    ] = True


class Fleet(Section, frozen=True):
    """The replicas' side."""

    probe_seconds: Annotated[
        float, Meta(gt=0, description="How often each replica is asked for its state; 1 s keeps foreign load visible.")
    ] = 1.0
    probe_timeout_seconds: Annotated[float, Meta(gt=0, description="Longest wait for one such question.")] = 2.0
    silence_seconds: Annotated[
        float,
        Meta(
            gt=0,
            description="A replica whose probes fail, and of which no byte has come for so long, is given up: requests "
            "that wait there go elsewhere. A busy HTTP server may hold its breath for seconds.",
        ),
    ] = 10.0
    connect_timeout_seconds: Annotated[
        float, Meta(gt=0, description="Longest wait for a connection: a replica one network away answers in ms.")
    ] = 3.0
    first_byte_timeout_seconds: Annotated[
        float,
        Meta(
            gt=0,
            description="Longest wait for an answer to begin, over all attempts; a long prefill in a long queue takes "
            "minutes.",
        ),
    ] = 900.0
    idle_timeout_seconds: Annotated[float, Meta(gt=0, description="Longest pause within an answer that has begun.")] = (
        300.0
    )
    upstream_idle_seconds: Annotated[
        float, Meta(gt=0, description="Idle connections to replicas are closed after this: below uvicorn's 5 s.")
    ] = 4.0
    max_attempts: Annotated[
        int,
        Meta(
            ge=1,
            le=10,
            description="Replicas that are given one request, at the most, before the client is told. One that cannot "
            "be reached does not count: nobody has worked on it there.",
        ),
    ] = 3
    resume_streams: Annotated[
        bool,
        Meta(
            description="A stream of text whose replica dies goes on at another one, where that is exact (n = 1, no "
            "tools or structured output, a tokenizer): the alternative is an error in the middle of the answer."
        ),
    ] = True
    api_key_file: Annotated[
        str,
        Meta(
            description="File with the key that replicas ask for (--api-key): for the router's own questions and, with "
            "`client_keys_file`, for requests of clients, whose own keys end here. Without that, theirs pass through."
        ),
    ] = ""


class Tls(Section, frozen=True):
    """How replicas whose URL begins with https:// are spoken with. Their certificates are always verified."""

    replica_ca_file: Annotated[
        str,
        Meta(
            description="Certificates that vouch for replicas: of your own authority, or the replicas' own where they "
            "sign themselves. Unset: the system's."
        ),
    ] = ""
    replica_cert_file: Annotated[
        str, Meta(description="Certificate to show replicas that ask for one (mutual TLS), in PEM. Unset: none.")
    ] = ""
    replica_key_file: Annotated[
        str, Meta(description="Its private key, without a password. Unset: the key lies in `replica_cert_file` too.")
    ] = ""


class Prompt(Section, frozen=True):
    """How prompts are read."""

    tokenizer: Annotated[
        str,
        Meta(
            description="Directory of the model's tokenizer (tokenizer.json, tekken.json or tiktoken's). Empty: the "
            "replica's own model directory, or the Hugging Face cache, if it lies on this machine too; else blocks of "
            "bytes."
        ),
    ] = ""
    hash_seed: Annotated[
        str | None,
        Meta(description="The engines' PYTHONHASHSEED, if it is set there. Unset: vLLM's own default seed."),
    ] = None
    prompt_memory_bytes: Annotated[
        int,
        Meta(
            ge=0,
            description="Memory for token ids and block hashes of earlier prompts, about 7 bytes a token: a next turn "
            "then costs only what is new in it. 0 remembers nothing. fastokens keeps 32 MiB of its own beside it, for "
            "each tokenizer.",
        ),
    ] = 256 * 1024 * 1024


class Events(Section, frozen=True):
    """What replicas publish of their caches (vLLM's --kv-events-config). Without it, it is predicted."""

    kv_events: Annotated[
        bool, Meta(description="Ask each replica where it publishes (GET /kv_event_sources), and hear it.")
    ] = True
    event_sources: Annotated[
        str,
        Meta(
            description="Sources of replicas that do not tell, as REPLICA[/RANK]=ENDPOINT[,REPLAY], separated by "
            "spaces: `gpu1:8000=tcp://gpu1:5557,tcp://gpu1:5558`. With a wildcard the router listens and the engine "
            "connects: `gpu2:8000=tcp://*:5557`."
        ),
    ] = ""


class HandOff(Section, frozen=True):
    """Prompts computed by one replica for another that answers (docs/operations.md, "Prefill and decode apart")."""

    prefill: Annotated[
        str,
        Meta(
            description="Replicas that compute prompts for others: URLs, separated by spaces, among `replicas` or "
            "beside them. Whole requests go there only where nothing else is left. Unset: those whose metrics show it."
        ),
    ] = ""
    decode: Annotated[
        str,
        Meta(description="Replicas that answer. One that is named in both lists does both, as does one of neither."),
    ] = ""
    split: Annotated[
        typing.Literal["cost", "always", "never", "uncached_tokens", "isl_bounding"],
        Meta(
            description="Which prompts are computed elsewhere: `cost` takes the fewer milliseconds, the transfer and "
            "slowed answers included; `uncached_tokens` and `isl_bounding` are other routers' rules, to compare with."
        ),
    ] = "cost"
    split_min_tokens: Annotated[
        int,
        Meta(ge=0, description="`cost` splits no prompt with fewer uncached tokens: what that could gain is not much."),
    ] = 256
    split_min_ratio: Annotated[
        float,
        Meta(
            ge=0,
            description="`cost` splits no prompt with fewer uncached tokens than so many times its answer's, which are "
            "as many as the request allows, up to 256. 0: whatever costs less.",
        ),
    ] = 0.0
    split_slow_links: Annotated[
        bool,
        Meta(
            description="`cost` takes a link that is no RDMA for as good as any: what is split over it may begin later "
            "itself where that spares others anything more."
        ),
    ] = False
    kv_link: Annotated[
        str,
        Meta(
            description="What moves KV: `rdma`, `tcp`, or GB/s and perhaps ms of latency, as `12,0.5`. Over what is no "
            "RDMA, told or measured, `cost` splits what would itself begin later only where that spares others several "
            "times as much. Unset: 25 Gb Ethernet, until measured."
        ),
    ] = ""
    kv_bytes_per_token: Annotated[
        float,
        Meta(gt=0, description="KV of one token over all layers and devices: 128 KiB for Llama 3.1 8B in 16 bits."),
    ] = 131_072.0
    connector: Annotated[
        typing.Literal["auto", "nixl", "nixl_push", "mooncake", "content"],
        Meta(
            description="How KV gets from one to the other. `auto`: NIXL, in the mode that a replica's answers show. "
            "`content` is for stores that find blocks by their content, as LMCache and offloading to shared storage."
        ),
    ] = "auto"
    kv_lease_seconds: Annotated[
        float,
        Meta(gt=0, description="The replicas' kv_lease_duration. Later than half of it, nobody is sent to fetch."),
    ] = 30.0
    prefill_timeout_seconds: Annotated[
        float,
        Meta(gt=0, description="Longest wait for a prompt to be computed elsewhere; then it is computed otherwise."),
    ] = 60.0
    mooncake_bootstrap_port: Annotated[
        int, Meta(ge=1, le=65535, description="Where Mooncake's prefill replicas tell who they are; vLLM's default.")
    ] = 8998
    pass_token_ids: Annotated[
        bool,
        Meta(
            description="Hand a chat's token ids over with its KV, so that it is tokenized once. They make bodies "
            "larger, and engines before vLLM 0.32 pass over them."
        ),
    ] = False


class Choice(Section, frozen=True):
    """How a replica is chosen."""

    policy: Annotated[
        typing.Literal["cost", "round_robin", "least_load"],
        Meta(description="`cost` weighs warm blocks against queues, in milliseconds; the others are for comparison."),
    ] = "cost"
    prefill_tokens_per_second: Annotated[
        float,
        Meta(
            gt=0,
            description="Prefill rate assumed until it is learned. Low on purpose: twice too low costs nearly nothing, "
            "twice too high costs 11-32 % of TTFT.",
        ),
    ] = 8000.0
    tie_band_ms: Annotated[
        float, Meta(ge=0, description="Costs this close are equal; an idle fleet would else collapse onto one replica.")
    ] = 10.0
    default_pool_blocks: Annotated[
        int,
        Meta(ge=16, description="Blocks a replica is assumed to hold while its metrics do not tell (num_gpu_blocks)."),
    ] = 16_384
    max_pool_blocks: Annotated[
        int,
        Meta(ge=16, description="Blocks remembered per replica at the most, about 100 bytes each, whatever it claims."),
    ] = 1_000_000


class Admin(Section, frozen=True):
    """The operators' side: what the router knows and would do. Never on the clients' port."""

    admin_host: Annotated[str, Meta(description="Address of the admin side. Beyond loopback it needs a token.")] = (
        "127.0.0.1"
    )
    admin_port: Annotated[
        int, Meta(ge=-1, le=65535, description="Port of the admin side; 0 takes a free one, -1 turns it off.")
    ] = 8081
    admin_token_file: Annotated[
        str, Meta(description="File with the token that the admin side asks for, as `Authorization: Bearer`.")
    ] = ""


class Shared(Section, frozen=True):
    """Redis or Valkey (6.2 or newer, or a cluster of them), where several routers share what they know."""

    redis: Annotated[
        str,
        Meta(
            description="redis://, rediss:// (TLS) or unix:///path; several nodes of a cluster as "
            "redis://a:6379,b:6379; `embedded` starts a private one. Unset: this router knows only what it sees itself."
        ),
    ] = ""
    redis_password_file: Annotated[
        str, Meta(description="File with the password: what stands in a URL is seen in the list of processes.")
    ] = ""
    redis_ca_file: Annotated[
        str, Meta(description="Certificates that vouch for the server under rediss://. Unset: the system's.")
    ] = ""
    redis_namespace: Annotated[
        str,
        Meta(
            pattern=r"^[A-Za-z0-9_.:-]{1,64}\Z",
            description="Before every key, as its hash tag; routers of one fleet have the same, other fleets another.",
        ),
    ] = "warmroute"
    redis_timeout_ms: Annotated[
        float,
        Meta(ge=2, description="A decision's longest wait, once: then it goes on alone till the store is back."),
    ] = 25.0
    redis_retry_seconds: Annotated[
        float, Meta(gt=0, description="Longest pause between attempts to reach a store that is gone, made aside.")
    ] = 1.0
    redis_ttl_seconds: Annotated[
        int,
        Meta(ge=60, description="Blocks not used so long are forgotten; sooner where the pools turn over faster."),
    ] = 3600
    redis_lease_seconds: Annotated[
        float,
        Meta(ge=0.2, description="A router's load counts this long without being told again: what a dead one leaves."),
    ] = 3.0
    redis_queue_blocks: Annotated[
        int,
        Meta(
            ge=1024,
            description="Blocks that wait to be told, 8 bytes each; beyond it the oldest are dropped. "
            "As many of the latest are kept for a store that lost them.",
        ),
    ] = 1_000_000


class Log(Section, frozen=True):
    """What the router says of itself, and of each request."""

    log_level: Annotated[
        typing.Literal["debug", "info", "warning", "error"],
        Meta(description="The least that is told on standard error: one line a change, none a request."),
    ] = "info"
    log_format: Annotated[
        typing.Literal["text", "json"], Meta(description="`json`: one object a line, for log collectors.")
    ] = "text"
    access_log: Annotated[
        str,
        Meta(
            description="File that one JSON object for each request is appended to, `-` for standard output. Off by "
            "default: it costs about 10 µs of CPU a request. Never prompts, answers or keys."
        ),
    ] = ""


class Trace(Section, frozen=True):
    """Spans of requests. Without an endpoint, `traceparent` passes through as it comes."""

    otlp_endpoint: Annotated[
        str,
        Meta(
            description="Base URL of an OpenTelemetry collector that takes OTLP over HTTP (JSON), as "
            "http://collector:4318. Unset: no spans, at no cost."
        ),
    ] = ""
    otlp_headers_file: Annotated[
        str, Meta(description="File with headers for the collector, one `Name: value` on each line.")
    ] = ""
    otlp_sample_ratio: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description="Part of the requests that are traced, of those that bring no `traceparent`; of others their "
            "sender decides.",
        ),
    ] = 1.0


class Settings(Section, frozen=True):
    """The whole tree."""

    replicas: Annotated[list[str], Meta(description="The replicas' base URLs, as http://gpu1:8000.")] = []
    listen: Listen = Listen()
    fleet: Fleet = Fleet()
    tls: Tls = Tls()
    prompt: Prompt = Prompt()
    events: Events = Events()
    handoff: HandOff = HandOff()
    choice: Choice = Choice()
    shared: Shared = Shared()
    admin: Admin = Admin()
    log: Log = Log()
    trace: Trace = Trace()


LIVE = frozenset(
    {
        "max_body_bytes",
        "max_buffered_bytes",
        "max_header_bytes",
        "max_headers",
        "max_connections",
        "header_timeout_seconds",
        "body_timeout_seconds",
        "keep_alive_seconds",
        "sse_keep_alive_seconds",
        "drain_seconds",
        "grace_seconds",
        "client_keys_file",
        "max_connections_per_address",
        "tls_cert_file",
        "tls_key_file",
        "tls_client_ca_file",
        "replica_ca_file",
        "replica_cert_file",
        "replica_key_file",
        "show_choice",
        "first_byte_timeout_seconds",
        "idle_timeout_seconds",
        "max_attempts",
        "prefill",
        "decode",
        "api_key_file",
        "event_sources",
        "policy",
        "tie_band_ms",
        "admin_token_file",
        "log_level",
        "access_log",
    }
)
"""Settings that a reload (SIGHUP) takes up, beside `replicas`. All others are read at start alone."""

SECTIONS: dict[str, type[Section]] = {
    "listen": Listen,
    "fleet": Fleet,
    "tls": Tls,
    "prompt": Prompt,
    "events": Events,
    "handoff": HandOff,
    "choice": Choice,
    "shared": Shared,
    "admin": Admin,
    "log": Log,
    "trace": Trace,
}


class Leaf(typing.NamedTuple):
    """One setting: the section it is in, its name, type, default and documentation."""

    section: str
    name: str
    type: Any
    default: Any
    text: str
    meta: Meta

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def env(self) -> str:
        return ENV_PREFIX + self.name.upper()

    @property
    def choices(self) -> tuple[str, ...]:
        """All there is to choose from; empty where that is no list."""
        if self.type is bool:
            return ("true", "false")
        return typing.get_args(self.type) if typing.get_origin(self.type) is typing.Literal else ()

    @property
    def wanted(self) -> str:
        """What a value must be, in words."""
        if self.choices:
            *others, last = self.choices
            return f"{', '.join(others)} or {last}"
        kind = {int: "a whole number", float: "a number"}.get(self.type, "text")
        low, above, high = self.meta.ge, self.meta.gt, self.meta.le
        if low is not None and high is not None:
            return f"{kind} from {low} to {high}"
        if low is not None:
            return f"{kind} of at least {low}"
        return f"{kind} above {above}" if above is not None else kind


def leaves() -> list[Leaf]:
    """Every setting but `replicas`, in the order of the page."""
    found = []
    for section, struct in SECTIONS.items():
        hints = typing.get_type_hints(struct, include_extras=True)
        for field in msgspec.structs.fields(struct):
            inner, meta = typing.get_args(hints[field.name])
            found.append(Leaf(section, field.name, inner, field.default, meta.description, meta))
    return found


def load(
    *,
    replicas: list[str] | None = None,
    file: Path | None = None,
    flags: dict[str, str] | None = None,
    environ: typing.Mapping[str, str] = os.environ,
) -> Settings:
    """The settings in force. `flags` maps leaf names to text. Raises ConfigError."""
    tree = _from_file(file) if file is not None else {}
    known = {leaf.name: leaf for leaf in leaves()}
    given = {name: f"--config {file}: {section}.{name}" for section in SECTIONS for name in tree.get(section, {})}
    for key, text in environ.items():
        if key.startswith(ENV_PREFIX) and key != CONFIG_ENV and not _service_link(key, text):
            name = key.removeprefix(ENV_PREFIX).lower()
            if name == "replicas":
                tree["replicas"] = text.split()
            elif name in known:
                tree.setdefault(known[name].section, {})[name] = text
                given[name] = f"{key}={text}"
            else:
                raise ConfigError(f"environment: {key} is no setting{_hint(name, known, lambda n: known[n].env)}")
    for name, text in (flags or {}).items():
        tree.setdefault(known[name].section, {})[name] = text
        given[name] = f"{known[name].flag} {text}"
    for leaf in known.values():
        text = tree.get(leaf.section, {}).get(leaf.name)
        if leaf.type is bool and isinstance(text, str) and text.lower() in _WORDS:
            tree[leaf.section][leaf.name] = _WORDS[text.lower()]
        elif leaf.type is float and isinstance(text, (str, float)) and str(text).lower() in ("inf", "infinity", "nan"):
            raise ConfigError(f"{given[leaf.name]}: must be {leaf.wanted}")
    if replicas:
        tree["replicas"] = replicas
    try:
        settings = msgspec.convert(tree, Settings, strict=False)
    except msgspec.ValidationError as error:
        # msgspec ends with the place: "... - at `$.listen.port`".
        name = re.split(r"[.`\[]", str(error).partition(" - at `$.")[2] + "..")[1]
        if name in known:
            raise ConfigError(f"{given[name]}: must be {known[name].wanted}") from None
        raise ConfigError("replicas: must be a list of URLs, as [http://gpu1:8000, http://gpu2:8000]") from None
    lists = {
        "": settings.replicas,
        "--prefill: ": urls(settings.handoff.prefill),
        "--decode: ": urls(settings.handoff.decode),
    }
    if not any(lists.values()):
        raise ConfigError("no replicas given: warmroute serve http://gpu1:8000 http://gpu2:8000")
    for where, given_urls in lists.items():
        seen: dict[str, str] = {}
        for url in given_urls:
            try:
                address = parse_url(url)
            except ConfigError as error:
                raise ConfigError(f"{where}{error}") from None
            if address.name in seen:
                raise ConfigError(f"{where}replica {url} is given twice (as {seen[address.name]})")
            seen[address.name] = url
    return settings


def urls(text: str) -> list[str]:
    """The URLs of a setting that is a list of them."""
    return text.replace(",", " ").split()


def reloaded(old: Settings, new: Settings) -> tuple[Settings, list[str], list[str]]:
    """What holds after a reload; the names of the settings that change, and of those that would need a restart."""
    changed, fixed = [], []
    sections: dict[str, Any] = {"replicas": new.replicas}
    for leaf in leaves():
        section = sections.setdefault(leaf.section, getattr(new, leaf.section))
        was = getattr(getattr(old, leaf.section), leaf.name)
        if getattr(section, leaf.name) == was:
            continue
        if leaf.name in LIVE:
            changed.append(leaf.name)
        else:
            fixed.append(leaf.name)
            sections[leaf.section] = msgspec.structs.replace(section, **{leaf.name: was})
    return msgspec.structs.replace(new, **sections), changed, fixed


def _service_link(key: str, text: str) -> bool:
    """Kubernetes puts the addresses of a Service named "warmroute" into every pod's environment, under these names."""
    return bool(re.match(r"WARMROUTE_(SERVICE_(HOST|PORT)|PORT_\d+_)", key)) or (
        key == "WARMROUTE_PORT" and text.startswith(("tcp://", "udp://"))
    )


def _from_file(path: Path) -> dict[str, Any]:
    try:
        tree = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"--config {path}: the file is not UTF-8 text") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"--config {path}: not YAML: {' '.join(str(error).split())}") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"--config {path}: the file must hold a mapping of sections, like `listen:`")
    sections = {"replicas", *SECTIONS}
    for section, values in tree.items():
        if section not in sections:
            home = next((leaf.section for leaf in leaves() if leaf.name == section), None)
            where = f"; it belongs under `{home}:`" if home else _hint(str(section), sections, str)
            raise ConfigError(f"--config {path}: unknown key `{section}`{where}")
        if section == "replicas":
            continue
        if not isinstance(values, dict):
            raise ConfigError(f"--config {path}: `{section}` must be a mapping")
        names = {leaf.name for leaf in leaves() if leaf.section == section}
        for name in values:
            if name not in names:
                raise ConfigError(
                    f"--config {path}: unknown key `{section}.{name}`{_hint(str(name), names, lambda n: n)}"
                )
    return tree


def _hint(name: str, known: typing.Iterable[str], show: typing.Callable[[str], str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean `{show(close[0])}`?" if close else ""


def parse_url(url: str) -> Address:
    """A replica's address from its base URL. Raises ConfigError with a hint for what people usually forget."""
    if "://" not in url:
        raise ConfigError(f"replica `{url}` has no scheme; did you mean `http://{url}`?")
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise ConfigError(f"replica `{url}` is no URL: {error}") from None
    if parts.scheme not in ("http", "https"):
        raise ConfigError(f"replica `{url}`: the scheme must be http or https")
    try:
        port = parts.port
        if port == 0:
            raise ValueError
    except ValueError:
        raise ConfigError(f"replica `{url}`: the port must be a number from 1 to 65535") from None
    if not parts.hostname:
        raise ConfigError(f"replica `{url}` names no host")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ConfigError(f"replica `{url}`: only scheme, host, port and a base path may be given")
    base = parts.path.rstrip("/")
    if base.endswith("/v1"):
        raise ConfigError(f"replica `{url}`: leave out `/v1`, the router passes clients' paths on whole")
    tls = parts.scheme == "https"
    return Address(parts.hostname, port or (443 if tls else 80), tls, base)


def page() -> str:
    """docs/settings.md."""
    lines = [
        "# Settings",
        "",
        "Made by `python -m router.config`; do not edit.",
        "",
        "Each setting may stand in a YAML file (`--config FILE` or `WARMROUTE_CONFIG=FILE`, under its section), in the",
        "environment (`WARMROUTE_PORT=8080`) or on the command line (`--port 8080`); the later wins. Unknown names are",
        "refused.",
        "`replicas` is the list of URLs: positional on the command line, `replicas:` in the file,",
        "`WARMROUTE_REPLICAS` (separated by spaces) in the environment.",
        "",
        "What is marked * is taken up anew on SIGHUP, as `replicas` is; the rest is read at start alone.",
    ]
    section = ""
    for leaf in leaves():
        if leaf.section != section:
            section = leaf.section
            lines += [
                "",
                f"## {section}",
                "",
                SECTIONS[section].__doc__ or "",
                "",
                "| setting | default | what, and why this default |",
                "|---|---|---|",
            ]
        default = (
            "unset"
            if leaf.default in (None, "")
            else f"`{str(leaf.default).lower() if isinstance(leaf.default, bool) else leaf.default}`"
        )
        choices = (
            f" One of {', '.join(f'`{each}`' for each in leaf.choices)}."
            if leaf.choices and leaf.type is not bool
            else ""
        )
        mark = "*" if leaf.name in LIVE else ""
        lines.append(f"| `{leaf.name}`{mark} | {default} | {leaf.text}{choices} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    import sys

    sys.stdout.write(page())
