"""The metrics of several workers, as one page: nothing counted twice, nothing that was counted lost."""

from __future__ import annotations

import pytest

from router.gathered import Gathered, read, write

PAGE = """\
# HELP warmroute_requests_total Requests.
# TYPE warmroute_requests_total counter
warmroute_requests_total{{code="2xx",ending="complete"}} {requests}
# HELP warmroute_in_flight In flight.
# TYPE warmroute_in_flight gauge
warmroute_in_flight{{replica="gpu1:8000"}} {in_flight}
# HELP warmroute_replica_ready Ready.
# TYPE warmroute_replica_ready gauge
warmroute_replica_ready{{replica="gpu1:8000"}} {ready}
# HELP warmroute_index_blocks Blocks.
# TYPE warmroute_index_blocks gauge
warmroute_index_blocks{{replica="gpu1:8000"}} {blocks}
# HELP warmroute_ttft_seconds First tokens, {{ and }} and "all".
# TYPE warmroute_ttft_seconds histogram
warmroute_ttft_seconds_bucket{{le="0.1",replica="gpu1:8000"}} {quick}
warmroute_ttft_seconds_bucket{{le="+Inf",replica="gpu1:8000"}} {requests}
warmroute_ttft_seconds_count{{replica="gpu1:8000"}} {requests}
warmroute_ttft_seconds_sum{{replica="gpu1:8000"}} 0.5
"""


def page(
    requests: float = 0.0, in_flight: float = 0.0, ready: float = 1.0, blocks: float = 0.0, quick: float = 0.0
) -> str:
    return PAGE.format(requests=requests, in_flight=in_flight, ready=ready, blocks=blocks, quick=quick)


def samples(gathered: Gathered) -> dict[str, float]:
    return {sample: value for family in read(gathered.page()).values() for sample, value in family.samples.items()}


def test_a_page_is_written_as_it_was_read() -> None:
    assert write(read(page(requests=3.0, quick=1.0))) == page(requests=3.0, quick=1.0)


def test_parts_are_added_and_states_are_not() -> None:
    gathered = Gathered()
    gathered.heard(1, page(requests=3.0, in_flight=2.0, ready=1.0, blocks=100.0, quick=1.0))
    gathered.heard(2, page(requests=4.0, in_flight=1.0, ready=0.0, blocks=70.0, quick=4.0))
    found = samples(gathered)
    assert found['warmroute_requests_total{code="2xx",ending="complete"}'] == 7.0
    assert found['warmroute_in_flight{replica="gpu1:8000"}'] == 3.0
    assert found['warmroute_replica_ready{replica="gpu1:8000"}'] == 0.0
    assert found['warmroute_index_blocks{replica="gpu1:8000"}'] == 100.0
    assert found['warmroute_ttft_seconds_bucket{le="0.1",replica="gpu1:8000"}'] == 5.0
    assert found['warmroute_ttft_seconds_count{replica="gpu1:8000"}'] == 7.0
    assert found['warmroute_ttft_seconds_sum{replica="gpu1:8000"}'] == 1.0


@pytest.mark.fault("sums that fall")
def test_what_an_ended_worker_counted_stays_and_what_it_had_in_flight_does_not() -> None:
    gathered = Gathered()
    gathered.heard(1, page(requests=3.0, in_flight=2.0))
    gathered.heard(2, page(requests=4.0, in_flight=1.0))
    gathered.ended(1)
    key = 'warmroute_requests_total{code="2xx",ending="complete"}'
    assert samples(gathered)[key] == 7.0
    assert samples(gathered)['warmroute_in_flight{replica="gpu1:8000"}'] == 1.0
    gathered.heard(1, page(requests=1.0))
    assert samples(gathered)[key] == 8.0
    gathered.ended(1)
    gathered.ended(1)
    assert samples(gathered)[key] == 8.0


def test_series_of_a_replica_that_left_go_also_those_of_ended_workers() -> None:
    gathered = Gathered()
    gathered.heard(1, page(requests=3.0))
    gathered.heard(2, page(requests=4.0))
    gathered.ended(1)
    gathered.heard(2, page(requests=5.0).replace("gpu1", "gpu2"))
    found = samples(gathered)
    assert not [sample for sample in found if "gpu1" in sample]
    assert found['warmroute_requests_total{code="2xx",ending="complete"}'] == 8.0
    assert found['warmroute_ttft_seconds_count{replica="gpu2:8000"}'] == 5.0
