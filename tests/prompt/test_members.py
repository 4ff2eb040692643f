"""Members of a JSON body are changed where they stand, and every other byte stays."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.prompt.members import edited


@pytest.mark.parametrize(
    ("body", "changes", "becomes"),
    [
        (b'{"a":1,"b":2}', {"b": None}, b'{"a":1}'),
        (b'{"a":1,"b":2}', {"a": None}, b'{"b":2}'),
        (b'{"a":1, "b" : 2 , "c":3}', {"b": None}, b'{"a":1,   "c":3}'),
        (b'{"a":1,"b":2,"c":3}', {"b": None, "c": None}, b'{"a":1}'),
        (b'{"a":1,"b": 2 }', {"b": b"true"}, b'{"a":1,"b": true }'),
        (b'{"a": {"b":[1,{"b":2}]},"b":"}"}\n', {"b": b"0"}, b'{"a": {"b":[1,{"b":2}]},"b":0}\n'),
        (b'{"a":1 }', {"b": b"[]"}, b'{"a":1,"b":[] }'),
        (b'{"a":1,"b":2}', {"b": None, "c": b"3"}, b'{"a":1,"c":3}'),
        (b'{"b":2,"a":1}', {"b": None, "c": b"3"}, b'{"a":1,"c":3}'),
        (b'{"a":1,"b":2,"a":3}', {"a": b"0"}, b'{"a":0,"b":2,"a":0}'),
        (b'{"\\u0061":1,"b":2}', {"a": None}, b'{"b":2}'),
        (b'\xef\xbb\xbf{"a":1,"b":2}', {"b": b"3"}, b'\xef\xbb\xbf{"a":1,"b":3}'),
        ('{"a":"\u20ac","b":2}'.encode("utf-16"), {"b": b"3"}, '{"a":"\u20ac","b":3}'.encode("utf-16")),
        (b'{"a":1}', {"b": None}, b'{"a":1}'),
    ],
)
def test_edits(body: bytes, changes: dict[str, bytes | None], becomes: bytes) -> None:
    assert edited(body, changes) == becomes


def test_what_is_changed_only_where_it_is_given() -> None:
    where_given = {"stream": b"false", "n": b"1"}
    assert edited(b'{"a":1,"stream":true}', {"b": b"2"}, where_given=where_given) == b'{"a":1,"stream":false,"b":2}'


@pytest.mark.parametrize("body", [b"[1]", b"1", b"{}", b'{"a":1}'])
def test_a_body_of_which_nothing_stays_is_an_error(body: bytes) -> None:
    with pytest.raises(ValueError, match="no object"):
        edited(body, {"a": None})


NAMES = st.sampled_from(["a", "b", "c", "d", "\u00e9"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=8,
)


@given(
    members=st.dictionaries(NAMES, VALUES, min_size=1),
    changes=st.dictionaries(NAMES, st.none() | VALUES.map(lambda value: json.dumps(value).encode())),
    indent=st.sampled_from([None, 0, 2]),
    ascii_only=st.booleans(),
)
def test_whatever_is_changed_the_rest_means_what_it_did(
    members: dict[str, object], changes: dict[str, bytes | None], indent: int | None, ascii_only: bool
) -> None:
    wanted = {name: value for name, value in members.items() if changes.get(name, b"") is not None}
    body = json.dumps({"kept": 1, **members}, indent=indent, ensure_ascii=ascii_only).encode()
    wanted |= {name: json.loads(value) for name, value in changes.items() if value is not None}
    assert json.loads(edited(body, changes)) == {"kept": 1} | wanted
