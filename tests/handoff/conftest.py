import pytest

from tests.end_to_end.conftest import fleet
from tests.wire.conftest import bench, one_tokenizer, pytest_asyncio_loop_factories

__all__ = ["bench", "fleet", "one_tokenizer", "pytest_asyncio_loop_factories"]


@pytest.fixture
def pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each fake listens for its peers on a free port."""
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", "0")
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_HOST", "127.0.0.1")
