from tests.end_to_end.conftest import fleet
from tests.wire.conftest import bench, pytest_asyncio_loop_factories

__all__ = ["bench", "fleet", "pytest_asyncio_loop_factories"]
