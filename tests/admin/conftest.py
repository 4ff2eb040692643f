from tests.end_to_end.conftest import fleet, pytest_asyncio_loop_factories

__all__ = ["fleet", "pytest_asyncio_loop_factories"]
