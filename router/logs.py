"""The router's own log, on standard error: one line a change, as text or as JSON."""

from __future__ import annotations

import logging
import sys
from datetime import UTC, datetime

import orjson

TEXT = "%(asctime)s %(levelname)s %(name)s: {who}%(message)s"


class Json(logging.Formatter):
    """One object a line. `worker`: its number where there are several."""

    def __init__(self, worker: int | None) -> None:
        super().__init__()
        self._worker = {} if worker is None else {"worker": worker}

    def format(self, record: logging.LogRecord) -> str:
        said = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            **self._worker,
            "message": record.getMessage(),
        }
        if record.exc_info:
            said["trace"] = self.formatException(record.exc_info)
        return orjson.dumps(said).decode()


def configure(*, level: str, form: str, worker: int | None = None) -> None:
    """Set up the log of this process."""
    handler = logging.StreamHandler(sys.stderr)
    who = "" if worker is None else f"worker {worker}: "
    handler.setFormatter(Json(worker) if form == "json" else logging.Formatter(TEXT.format(who=who)))
    logging.basicConfig(handlers=[handler], force=True)
    set_level(level)


def set_level(level: str) -> None:
    logging.getLogger().setLevel(level.upper())
