from tests.wire.conftest import bench, pytest_asyncio_loop_factories

__all__ = ["bench", "pytest_asyncio_loop_factories"]
