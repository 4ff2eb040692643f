"""What the files that settings name hold: keys, tokens, certificates. Read whole before any of it is put to use.

So a reload either takes all of it or, where one file is wrong, nothing.
"""

from __future__ import annotations

import ssl
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from router.config import ConfigError, Settings
from router.wire.keys import Keys, KeysError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from router.config import Listen
    from router.wire.http import Headers


@dataclass(frozen=True, slots=True)
class Credentials:
    """None where no file is named."""

    clients: Keys | None
    replica_key: str | None
    admin_token: str | None
    front: ssl.SSLContext | None
    """For clients."""
    otlp_headers: dict[str, str]
    """For the collector of spans."""
    replicas: ssl.SSLContext
    """For replicas whose URL begins with https://."""

    @classmethod
    def read(cls, settings: Settings) -> Credentials:
        """Raises ConfigError, which never shows what a file holds."""
        return cls(
            clients=_keys(settings.listen.client_keys_file),
            replica_key=_secret("--api-key-file", settings.fleet.api_key_file),
            admin_token=_secret("--admin-token-file", settings.admin.admin_token_file),
            front=_front(settings.listen),
            otlp_headers=_headers("--otlp-headers-file", settings.trace.otlp_headers_file),
            replicas=for_replicas(settings),
        )

    @property
    def probe_headers(self) -> dict[str, str]:
        """What the router's own questions to replicas carry."""
        return {} if self.replica_key is None else {"Authorization": f"Bearer {self.replica_key}"}

    @property
    def request_headers(self) -> Headers:
        """What clients' requests carry to replicas instead of the clients' own keys, which end here."""
        if self.clients is None or self.replica_key is None:
            return []
        return [(b"Authorization", b"Bearer " + self.replica_key.encode())]


def for_replicas(settings: Settings, context: ssl.SSLContext | None = None) -> ssl.SSLContext:
    """How replicas are spoken with over TLS. `context`: one in use, that connections from now on are to follow; an
    authority that it trusts already stays trusted. Raises ConfigError."""
    tls = settings.tls
    if context is None:
        # Made by hand where an authority is named: the system's are not to be trusted then.
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT) if tls.replica_ca_file else ssl.create_default_context()
    if tls.replica_ca_file:
        with _named("--replica-ca-file", tls.replica_ca_file):
            context.load_verify_locations(tls.replica_ca_file)
    if tls.replica_cert_file:
        _load(context, "--replica-cert-file", tls.replica_cert_file, "--replica-key-file", tls.replica_key_file)
    elif tls.replica_key_file:
        raise ConfigError(f"--replica-key-file {tls.replica_key_file}: without a certificate (--replica-cert-file)")
    return context


def _front(listen: Listen) -> ssl.SSLContext | None:
    if not listen.tls_cert_file:
        if listen.tls_key_file or listen.tls_client_ca_file:
            raise ConfigError("--tls-cert-file is not given, but a key or authorities for clients are")
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    _load(context, "--tls-cert-file", listen.tls_cert_file, "--tls-key-file", listen.tls_key_file)
    if listen.tls_client_ca_file:
        with _named("--tls-client-ca-file", listen.tls_client_ca_file):
            context.load_verify_locations(listen.tls_client_ca_file)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _load(context: ssl.SSLContext, flag: str, cert: str, key_flag: str, key: str) -> None:
    def no_password() -> str:
        raise ConfigError(f"{key_flag if key else flag} {key or cert}: the private key has a password")

    with _named(f"{flag} {cert}, {key_flag}" if key else flag, key or cert):
        context.load_cert_chain(cert, key or None, no_password)


@contextmanager
def _named(flag: str, path: str) -> Iterator[None]:
    try:
        yield
    except ssl.SSLError as error:
        raise ConfigError(f"{flag} {path}: {(error.reason or 'not in PEM').lower().replace('_', ' ')}") from None
    except OSError as error:
        raise ConfigError(f"{flag} {path}: {error.strerror}") from None


def _keys(path: str) -> Keys | None:
    text = _text("--client-keys-file", path)
    try:
        return None if text is None else Keys(text.splitlines())
    except KeysError as error:
        raise ConfigError(f"--client-keys-file {path}: {error}") from None


def _secret(flag: str, path: str) -> str | None:
    text = _text(flag, path)
    if text is None:
        return None
    if not text.strip():
        raise ConfigError(f"{flag} {path}: the file is empty")
    if not text.strip().isprintable():
        raise ConfigError(f"{flag} {path}: the file must hold one line")
    return text.strip()


def _headers(flag: str, path: str) -> dict[str, str]:
    headers = {}
    for number, line in enumerate((_text(flag, path) or "").splitlines(), 1):
        name, colon, value = line.partition(":")
        if line.strip() and not (colon and name.strip().isascii() and value.strip().isprintable()):
            raise ConfigError(f"{flag} {path}: line {number} is not `Name: value`")
        if line.strip():
            headers[name.strip()] = value.strip()
    return headers


def _text(flag: str, path: str) -> str | None:
    if not path:
        return None
    try:
        return Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{flag} {path}: {getattr(error, 'strerror', None) or 'not a text file'}") from None
