from tests.end_to_end.conftest import fleet, one_tokenizer, pytest_asyncio_loop_factories

__all__ = ["fleet", "one_tokenizer", "pytest_asyncio_loop_factories"]
