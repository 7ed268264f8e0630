"""All options as a JSON Schema, for editors and for programs that check a job's settings."""

from __future__ import annotations

from typing import Any, Final

from zmq_datasource.options.parser import OptionDoc, OptionSet, Role, describe
from zmq_datasource.options.proxy import ProxyOptions
from zmq_datasource.options.read import ReadOptions
from zmq_datasource.options.types import Choice
from zmq_datasource.options.write import WriteOptions

__all__ = ["SETS", "json_schema"]

SETS: Final[dict[str, type[OptionSet]]] = {"source": ReadOptions, "sink": WriteOptions, "proxy": ProxyOptions}
_TYPES: Final[dict[type, str]] = {bool: "boolean", int: "integer"}
# Spark passes every value as text.
_TEXT: Final = "string"


def json_schema() -> dict[str, Any]:
    """The schema of an object with a property for each of ``SETS``."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Options of zmq_datasource",
        "type": "object",
        "additionalProperties": False,
        "properties": {name: {"$ref": f"#/$defs/{name}"} for name in SETS},
        "$defs": {name: _of_set(options) for name, options in SETS.items()},
    }


def _of_set(options: type[OptionSet]) -> dict[str, Any]:
    return {
        "type": "object",
        "additionalProperties": False,
        "properties": {option.name: _of_option(option) for option in describe(options)},
        "patternProperties": {
            r"^zmq\.": {"description": "A socket option of libzmq.", "type": ["string", "integer"]}
        },
    }


def _of_option(option: OptionDoc) -> dict[str, Any]:
    schema: dict[str, Any] = {"description": option.doc, "type": _TEXT}
    if issubclass(option.kind, Choice):
        schema["enum"] = list(option.kind.allowed)
    elif option.kind in _TYPES:
        schema["type"] = _TYPES[option.kind]
        limits = option.hint.__metadata__[0]
        found = {"minimum": limits.ge, "maximum": limits.le}
        schema |= {name: limit for name, limit in found.items() if limit is not None}
    if option.default:
        schema["default"] = option.default_value if option.kind in _TYPES else option.default
    for role, name in ((Role.STREAM, "streaming"), (Role.BATCH, "batch")):
        if role in option.roles:
            schema["$comment"] = f"Only for a {name} read."
    return schema
