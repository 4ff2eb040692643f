"""Bodies: parsed and checked as FastAPI and pydantic do it for vLLM, with the errors they give."""

import json
from collections.abc import Mapping
from typing import Any

from fake_backend.errors import ApiError, UnreadableBodyError
from fake_backend.wire import Request

Body = dict[str, Any]

_SHOWN = 200
_MISSING = object()


def read_body(request: Request) -> Body:
    """The JSON object of a request. Raises ApiError 400."""
    media_type = request.headers.get("content-type", "").lower().split(";", 1)[0]
    if media_type != "application/json":
        raise _refused("Unsupported Media Type: Only 'application/json' is allowed", None)
    if not request.body:
        raise invalid("missing", "body", "Field required", None)
    value = _parse(request.body)
    if value is None:
        raise invalid("missing", "body", "Field required", None)
    if not isinstance(value, dict):
        message = "Input should be a valid dictionary or object to extract fields from"
        raise invalid("model_attributes_type", "body", message, value)
    return value


def _parse(body: bytes) -> Any:
    """The standard library's parser, as starlette has it: others read big integers, NaN and surrogates otherwise."""
    try:
        return json.loads(body)
    except json.JSONDecodeError as error:
        raise _refused(
            {
                "type": "json_invalid",
                "loc": f"body.{error.pos}",
                "msg": "JSON decode error",
                "input": "<dict of 0 items>",
                "ctx": {"error": error.msg},
            },
            f"body.{error.pos}",
        ) from error
    except (RecursionError, ValueError) as error:
        raise UnreadableBodyError from error


def invalid(kind: str, location: str, message: str, value: object, context: dict[str, Any] | None = None) -> ApiError:
    """One pydantic error, e.g. ``missing`` at ``body.messages``."""
    error = {"type": kind, "loc": location, "msg": message, "input": _summary(value)}
    return _refused(error | ({"ctx": context} if context else {}), location)


def _refused(error: object, param: str | None) -> ApiError:
    return ApiError(400, f"1 validation error:\n  {error}", "Bad Request", param)


def _summary(value: object) -> object:
    if isinstance(value, str):
        return value if len(value) <= _SHOWN else value[:_SHOWN] + "...[truncated]"
    if isinstance(value, list | dict):
        return f"<{type(value).__name__} of {len(value)} items>"
    return str(value)[:_SHOWN]


class Fields:
    """Typed reading of a body. ``null`` counts as left out; a wrong type is pydantic's error.

    Numbers and booleans in strings are accepted where pydantic's lax mode accepts them.
    """

    def __init__(self, body: Body, location: str = "body") -> None:
        self.body = body
        self._location = location

    def _error(
        self, name: str, kind: str, message: str, value: object, context: dict[str, Any] | None = None
    ) -> ApiError:
        return invalid(kind, f"{self._location}.{name}", message, value, context)

    def required(self, name: str) -> Any:
        value = self.body.get(name, _MISSING)
        if value is _MISSING:
            raise self._error(name, "missing", "Field required", self.body)
        return value

    def text(self, name: str) -> str | None:
        value = self.body.get(name)
        if value is None or isinstance(value, str):
            return value
        raise self._error(name, "string_type", "Input should be a valid string", value)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.body.get(name)
        if value is None:
            return default
        if isinstance(value, bool):
            return value
        if value in (0, 1):
            return bool(value)
        if isinstance(value, str) and value.lower() in _WORDS:
            return _WORDS[value.lower()]
        if isinstance(value, str | int | float):
            message = "Input should be a valid boolean, unable to interpret input"
            raise self._error(name, "bool_parsing", message, value)
        raise self._error(name, "bool_type", "Input should be a valid boolean", value)

    def bounded(self, name: str, low: int, high: int) -> int | None:
        """An integer that the schema bounds."""
        value = self.integer(name)
        if value is not None and value > high:
            message = f"Input should be less than or equal to {high}"
            raise self._error(name, "less_than_equal", message, value, {"le": high})
        if value is not None and value < low:
            message = f"Input should be greater than or equal to {low}"
            raise self._error(name, "greater_than_equal", message, value, {"ge": low})
        return value

    def integer(self, name: str) -> int | None:
        value = self.body.get(name)
        if value is None or (isinstance(value, int) and not isinstance(value, bool)):
            return value
        if isinstance(value, bool):
            return int(value)
        if isinstance(value, float):
            if value.is_integer():
                return int(value)
            message = "Input should be a valid integer, got a number with a fractional part"
            raise self._error(name, "int_from_float", message, value)
        if isinstance(value, str):
            try:
                return int(value)
            except ValueError:
                message = "Input should be a valid integer, unable to parse string as an integer"
                raise self._error(name, "int_parsing", message, value) from None
        raise self._error(name, "int_type", "Input should be a valid integer", value)

    def number(self, name: str) -> float | None:
        value = self.body.get(name)
        if value is None or isinstance(value, int | float):
            return value
        if isinstance(value, str):
            try:
                return float(value)
            except ValueError:
                message = "Input should be a valid number, unable to parse string as a number"
                raise self._error(name, "float_parsing", message, value) from None
        raise self._error(name, "float_type", "Input should be a valid number", value)

    def array(self, name: str) -> list[Any] | None:
        value = self.body.get(name)
        if value is None or isinstance(value, list):
            return value
        raise self._error(name, "list_type", "Input should be a valid list", value)

    def mapping(self, name: str) -> Mapping[str, Any] | None:
        value = self.body.get(name)
        if value is None or isinstance(value, dict):
            return value
        raise self._error(name, "dict_type", "Input should be a valid dictionary", value)


_WORDS = {"true": True, "t": True, "yes": True, "y": True, "on": True, "1": True} | {
    "false": False, "f": False, "no": False, "n": False, "off": False, "0": False,
}  # fmt: skip
