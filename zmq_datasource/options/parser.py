"""Reads Spark's text options into checked values. Knows no option by name.

A subclass of ``OptionSet`` declares its options as annotated fields (``doc``). ``parse`` reads text into an instance.
``describe`` lists the declarations, for the reference and for error messages.
"""

from __future__ import annotations

import difflib
import enum
import functools
import re
from collections.abc import Collection, Iterator, Mapping
from types import UnionType
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec
from msgspec import Meta

from zmq_datasource.errors import OptionError


def doc(text: str, *roles: Role, **constraints: Any) -> Meta:
    """Declare the meaning of an option, where it applies, and the limits of its value.

    Args:
        text: The meaning, for the reference.
        roles: Where the option applies; without one, everywhere.
        constraints: Limits of its value, as in msgspec's ``Meta``: ``ge``, ``le``, ``pattern``.
    """
    return Meta(description=text, extra={"roles": frozenset(roles)}, **constraints)


class Role(enum.Enum):
    """Where an option applies."""

    QUERY = "a query, and not a program that only receives"
    BATCH = "a batch read"
    SOCKET = "a process that opens a socket"
    UNACKNOWLEDGED = "a socket without acknowledgements"
    LIVE = "a streaming read, or a batch read of a socket"
    LOG = "a log, or a streaming read"
    WRITER = "a process that writes a log, and not a query that only reads one"
    ROWS = "rows of messages, not the gap table"
    CUSTOM = "framing=custom"
    NUMBERED = "numbered messages"


_SECRET = re.compile("secret|password", re.IGNORECASE)


class ZmqOptions(dict[str, str]):
    """The ``zmq.*`` options by libzmq's name in lower case. ``repr()`` hides secrets."""

    def __repr__(self) -> str:
        return repr({k: "***" if _SECRET.search(k) else v for k, v in self.items()})


class OptionSet(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Base of all sets of options."""

    # parse() collects all options "zmq.<name>" here.
    zmq: ZmqOptions = msgspec.field(default_factory=ZmqOptions)

    title: ClassVar[str] = "option"
    ignored: ClassVar[frozenset[str]] = frozenset()  # names that ``parse`` skips, in lower case

    def check(self) -> None:
        """Raise OptionError for values that cannot be combined. Called by ``parse``."""

    def refuse(self, fields: Collection[str], reason: str) -> None:
        """Raise OptionError if one of these fields is not at its default.

        Args:
            reason: Follows the option's name in the error, as in "needs walLocation".
        """
        for option in describe(type(self)):
            if option.field in fields and getattr(self, option.field) != option.default_value:
                raise OptionError(f"option {option.name} {reason}; remove it")

    def of_role(self, *roles: Role) -> list[str]:
        """The fields that have one of these roles."""
        return [option.field for option in describe(type(self)) if not option.roles.isdisjoint(roles)]


class OptionDoc(NamedTuple):
    """A declared option, for the reference and for error messages.

    Attributes:
        name: The name that users write, in camelCase.
        field: The name of the field in the ``OptionSet``.
        words: The kind of value in words, such as "a duration".
        default: The default as text; empty if there is none.
        default_value: The default itself.
        roles: Where the option applies; empty for everywhere.
        doc: The meaning.
        kind: The type of a value that is set, so never None.
        allowed: The words that are allowed, read in any case; empty if it is not one of a few.
        hint: As ``kind``, with the limits of the value, for msgspec.
    """

    name: str
    field: str
    words: str
    default: str
    default_value: Any
    roles: frozenset[Role]
    doc: str
    kind: type
    allowed: tuple[str, ...]
    hint: Any


_O = TypeVar("_O", bound=OptionSet)


@functools.cache
def describe(cls: type[OptionSet]) -> tuple[OptionDoc, ...]:
    """The options of ``cls``, without ``zmq.*``, in the order of their declaration."""
    return tuple(_describe(cls))


def _describe(cls: type[OptionSet]) -> Iterator[OptionDoc]:
    hints = get_type_hints(cls, include_extras=True)
    for field in msgspec.structs.fields(cls):
        if field.name == "zmq":
            continue
        hint = hints[field.name]
        meta = next(a for a in hint.__metadata__ if isinstance(a, Meta))
        default = field.default
        kind, allowed = _kind_of(hint.__origin__)
        shown = "" if default in (None, ()) else str(default)
        yield OptionDoc(
            name=field.encode_name,
            field=field.name,
            words=" or ".join((", ".join(allowed[:-1]), allowed[-1]))
            if allowed
            else _PLAIN_WORDS.get(kind) or kind.words,
            default=shown.lower() if isinstance(default, bool) else shown,
            default_value=default,
            roles=(meta.extra or {}).get("roles", frozenset()),
            doc=meta.description or "",
            kind=kind,
            allowed=allowed,
            hint=Annotated[kind, meta],
        )


def _kind_of(declared: Any) -> tuple[Any, tuple[str, ...]]:
    """The type of a value that is set; and the words that are allowed, if it is one of a few."""
    optional = get_origin(declared) in (Union, UnionType)
    (kind,) = [t for t in (get_args(declared) if optional else (declared,)) if t is not type(None)]
    return (str, get_args(kind)) if get_origin(kind) is Literal else (kind, ())


# The kinds of value in words. The types of ``options`` have ``words`` themselves.
_PLAIN_WORDS = {str: "text", int: "a whole number", bool: "true or false"}


def parse(cls: type[_O], options: Mapping[str, str]) -> _O:
    """Read text options into ``cls``. Names may have any case.

    Raises:
        OptionError: An unknown name, a value outside its range, or values that cannot be combined. The text names the
            option, the value and what is allowed.
    """
    known = {option.name.lower(): option for option in describe(cls)}
    values: dict[str, Any] = {}
    zmq = ZmqOptions()
    for raw_name, text in options.items():
        name = raw_name.lower()
        if name in cls.ignored:
            continue
        if name.startswith("zmq."):
            zmq[name.removeprefix("zmq.")] = text
        elif name in known:
            values[known[name].field] = _read(known[name], text)
        else:
            raise OptionError(_unknown(cls, raw_name, known))
    parsed = cls(**values, zmq=zmq)
    parsed.check()
    return parsed


def texts_of(cls: type[OptionSet], keywords: Mapping[str, object]) -> dict[str, str]:
    """Turn keyword arguments into text options for ``parse``.

    Names may be in snake_case or as documented; ``zmq_rcvbuf`` means ``zmq.rcvbuf``. Booleans, numbers and lists become
    text. None is left out.
    """
    names = {option.field: option.name for option in describe(cls)}
    return {
        names.get(name, name.replace("zmq_", "zmq.", 1) if name.startswith("zmq_") else name): _text(value)
        for name, value in keywords.items()
        if value is not None
    }


def _text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        # A topic may contain a comma, which separates topics in a text.
        return ",".join(f"hex:{text.encode().hex()}" if "," in text else text for text in map(str, value))
    return str(value)


def _read(option: OptionDoc, text: str) -> Any:
    try:
        if option.allowed:
            for word in option.allowed:
                if word.lower() == text.strip().lower():
                    return word
            raise ValueError(f"it must be {option.words}")
        if hasattr(option.kind, "read"):
            return option.kind.read(text if getattr(option.kind, "keeps_spaces", False) else text.strip())
        return msgspec.convert(text.strip(), option.hint, strict=False)
    except (ValueError, msgspec.ValidationError) as e:  # a ValidationError is a ValueError since 0.21
        # msgspec would name a Python type. Describe the value in the words of the reference.
        reason = f"it must be {option.words}" if "got `str`" in str(e) else str(e)
        if isinstance(e, msgspec.ValidationError):
            reason += f" ({option.doc})"
        raise OptionError(f"option {option.name}={text!r}: {reason}") from None


def _unknown(cls: type[OptionSet], name: str, known: Mapping[str, OptionDoc]) -> str:
    near = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.5)
    if near:
        return f"unknown {cls.title} {name!r}; did you mean {known[near[0]].name!r}?"
    names = ", ".join(sorted(option.name for option in known.values()))
    return f"unknown {cls.title} {name!r}; there are {names}, and libzmq's own, which begin with 'zmq.'"
