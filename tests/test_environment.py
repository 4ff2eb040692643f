"""The environment of a pod: what Kubernetes puts there is not for the router, whatever it is named."""

from __future__ import annotations

import pytest

from router.config import ConfigError, load

URL = "http://gpu1:8000"
# kubelet adds these for every Service; this one is named "warmroute" and has a named and an unnamed port.
LINKS = {
    "WARMROUTE_SERVICE_HOST": "10.0.0.1",
    "WARMROUTE_SERVICE_PORT": "80",
    "WARMROUTE_SERVICE_PORT_HTTP": "80",
    "WARMROUTE_PORT": "tcp://10.0.0.1:80",
    "WARMROUTE_PORT_80_TCP": "tcp://10.0.0.1:80",
    "WARMROUTE_PORT_80_TCP_PROTO": "tcp",
    "WARMROUTE_PORT_80_TCP_PORT": "80",
    "WARMROUTE_PORT_80_TCP_ADDR": "10.0.0.1",
}


def test_service_links_are_no_settings() -> None:
    assert load(replicas=[URL], environ=LINKS) == load(replicas=[URL], environ={})
    assert load(replicas=[URL], environ=LINKS).listen.port == 8080
    assert load(replicas=[URL], environ={**LINKS, "WARMROUTE_HOST": "0.0.0.0"}).listen.host == "0.0.0.0"
    assert load(replicas=[URL], environ={**LINKS, "WARMROUTE_PORT": "9000"}).listen.port == 9000


@pytest.mark.parametrize(
    ("name", "text"),
    [("WARMROUTE_PORT", "http://10.0.0.1:80"), ("WARMROUTE_PORT", "eighty"), ("WARMROUTE_PORTS_80_TCP", "x")],
)
def test_what_only_looks_like_one_is_still_refused(name: str, text: str) -> None:
    with pytest.raises(ConfigError):
        load(replicas=[URL], environ={name: text})
