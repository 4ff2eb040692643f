"""What the files that settings name hold: keys, tokens. Read whole before any of it is put to use.

So a reload either takes all of it or, where one file is wrong, nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from router.config import ConfigError, Settings
from router.wire.keys import Keys, KeysError

if TYPE_CHECKING:
    from router.wire.http import Headers


@dataclass(frozen=True, slots=True)
class Credentials:
    """None where no file is named."""

    clients: Keys | None
    replica_key: str | None
    admin_token: str | None

    @classmethod
    def read(cls, settings: Settings) -> Credentials:
        """Raises ConfigError, which never shows what a file holds."""
        return cls(
            clients=_keys(settings.listen.client_keys_file),
            replica_key=_secret("--api-key-file", settings.fleet.api_key_file),
            admin_token=_secret("--admin-token-file", settings.admin.admin_token_file),
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


def _text(flag: str, path: str) -> str | None:
    if not path:
        return None
    try:
        return Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{flag} {path}: {getattr(error, 'strerror', None) or 'not a text file'}") from None
