"""Which reader serves which model: the one tokenizer that the settings name, or the one that the model brings."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

from router.prompt.bodies import Bodies, marks
from router.prompt.memo import Memo
from router.prompt.reader import Reader
from router.prompt.request import Beginning, can_be_known
from router.prompt.tokens import Tokenizer, TokenizerError

log = logging.getLogger("warmroute.prompt")


class Readers:
    """A `Reader` a model. `find` reads files: call it off the event loop."""

    def __init__(self, tokenizer: str, memory_bytes: int) -> None:
        """`tokenizer`: the directory that the settings name, for every model; "" looks for each model's own.
        `memory_bytes`: the most to spend on remembering prompts, of all models together.

        Raises TokenizerError where a directory was named and cannot be used.
        """
        self.memo = Memo(memory_bytes)
        self._bodies = Bodies(self.memo.bodies)
        self._named = Reader(Tokenizer.load(Path(tokenizer)), self.memo) if tokenizer else None
        self._by_directory: dict[Path, Reader] = {}
        self._loading = threading.Lock()
        self._found: dict[str, Reader] = {}
        self._bytes = Reader(None, self.memo)

    def beginning(self, path: str, body: bytes) -> Beginning | None:
        """What is known of a body, by its first bytes; None where it is of a kind that is not remembered."""
        if not can_be_known(path, body):
            return None
        found = marks(body)
        return Beginning(found, self._bodies.find(body, found))

    def __getitem__(self, model: str) -> Reader:
        """The reader of a base model; bytes where nothing better was found."""
        if self._named is not None:
            return self._named
        return self._found.get(model, self._bytes)

    def find(self, model: str, root: str | None) -> Reader:
        """Look for the tokenizer of a model that a replica serves from `root`, a directory or a repository's name."""
        if self._named is None and model not in self._found:
            with self._loading:  # replicas become ready together, and serve the same model
                if model not in self._found:
                    self._found[model] = self._look(model, root)
        return self[model]

    def _look(self, model: str, root: str | None) -> Reader:
        for directory in _places(root):
            if directory in self._by_directory:
                return self._by_directory[directory]
            try:
                if Tokenizer.is_in(directory):
                    reader = self._by_directory[directory] = Reader(Tokenizer.load(directory), self.memo)
                    return reader
            except (TokenizerError, OSError, ValueError) as error:
                log.warning("model %s: the tokenizer in %s is of no use: %s", model, directory, error)
        return self._bytes


def _places(root: str | None) -> list[Path]:
    """Where a model's files may lie on this machine: the very directory, or the Hugging Face cache (no download)."""
    if not root:
        return []
    if Path(root).is_absolute():
        return [Path(root)]
    home = Path(os.environ.get("HF_HOME") or Path("~/.cache/huggingface").expanduser())
    cache = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    snapshots = cache / f"models--{root.replace('/', '--')}" / "snapshots"
    try:
        return sorted(snapshots.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
    except OSError:
        return []
