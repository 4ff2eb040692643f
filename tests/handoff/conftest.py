import functools

import pytest

from router.prompt.tokens import Tokenizer
from tests.end_to_end.conftest import fleet
from tests.wire.conftest import bench, pytest_asyncio_loop_factories

__all__ = ["bench", "fleet", "pytest_asyncio_loop_factories"]

_load = functools.cache(Tokenizer.load)


@pytest.fixture
def pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each fake listens for its peers on a free port. All read one tokenizer, which takes long to load and never
    changes."""
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", "0")
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_HOST", "127.0.0.1")
    monkeypatch.setattr(Tokenizer, "load", _load)
