"""What the demo's screen says, from given figures."""

from rich.console import Console

from bench.client import Record
from bench.demo import Side, comparison, screen
from bench.replica_metrics import ReplicaMetrics

BUSY = ReplicaMetrics(
    finished=40, running=3, waiting=2, kv_usage=0.155, queries=8000, hits=6000, block_size=16, blocks=1500
)


def record(*, cached: int, ttft_s: float, error: str | None = None) -> Record:
    return Record(0, 0, 1.0, ttft_s, 2.0, prompt_tokens=100, cached_tokens=cached, answer_tokens=5, error=error)


def sides() -> tuple[Side, Side]:
    warm = Side("warmroute", "http://127.0.0.1:8080", ["http://127.0.0.1:1", "http://127.0.0.1:2"])
    warm.metrics["http://127.0.0.1:1"] = BUSY
    warm.records = [record(cached=80, ttft_s=0.1), record(cached=60, ttft_s=0.3)]
    plain = Side("round robin", "http://127.0.0.1:8081", ["http://127.0.0.1:3"])
    plain.records = [record(cached=30, ttft_s=0.5), record(cached=0, ttft_s=9.0, error="status 503")]
    return warm, plain


def lines(renderable: object) -> list[list[str]]:
    """The words of each line, without the table's rules."""
    console = Console(width=80, color_system=None)
    with console.capture() as capture:
        console.print(renderable)
    return [line.replace("│", " ").split() for line in capture.get().splitlines()]


def test_replicas_show_their_figures_and_one_that_was_not_read_yet_shows_none() -> None:
    shown = lines(screen(*sides()))
    assert ["127.0.0.1:1", "45", "5", "2", "15.5%", "75.0%"] in shown
    assert ["127.0.0.1:2", *"-----"] in shown


def test_the_comparison_leaves_failed_requests_out_of_the_rates_and_counts_them() -> None:
    shown = lines(comparison(*sides()))
    assert ["warmroute", "2", "0", "70.0%", "200", "ms", "300", "ms"] in shown
    assert ["round", "robin", "1", "1", "30.0%", "500", "ms", "500", "ms"] in shown


def test_before_the_first_answer_there_is_nothing_to_compare() -> None:
    warm, plain = sides()
    warm.records, plain.records = [], []
    assert ["warmroute", "0", "0", "-", "-", "-"] in lines(comparison(warm, plain))


def test_the_lines_to_try_fit_a_terminal_of_80_columns_unbroken() -> None:
    console = Console(width=80, color_system=None)
    with console.capture() as capture:
        console.print(screen(*sides()))
    assert (
        "curl http://127.0.0.1:8080/v1/chat/completions \\\n"
        "  -H 'content-type: application/json' \\\n"
        """  -d '{"model": "Llama-3.1-8B", "max_tokens": 24,\n"""
        """       "messages": [{"role": "user", "content": "Hello"}]}'\n"""
    ) in capture.get()
