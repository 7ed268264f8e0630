"""The types of options: durations, sizes, locations, topics, times and others.

Each type has ``read(text)``, which raises ValueError with the reason and the way out. ``str()`` shows a value as the
reference does.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import ClassVar
from urllib.parse import unquote, urlsplit

import humanfriendly


class CountedBy(tuple[str, ...]):
    """What has a counter of its own. If it is empty, nothing is tracked."""

    words: ClassVar[str] = "names"

    allowed = ("publisher", "topic", "endpoint")

    def __str__(self) -> str:
        return ",".join(self) or "none"

    @classmethod
    def read(cls, text: str) -> CountedBy:
        parts = [part.strip().lower() for part in text.split(",")]
        if parts == ["none"]:
            return cls()
        if not set(parts) <= set(cls.allowed):
            raise ValueError("it must be none, or a list of publisher, topic, endpoint")
        return cls(name for name in cls.allowed if name in parts)


class Delimiter(bytes):
    """Bytes that separate, read from text, or from ``hex:`` and digits as a topic is."""

    words: ClassVar[str] = "bytes"

    keeps_spaces: ClassVar[bool] = True

    def __str__(self) -> str:
        return self.decode() if self.isascii() and self.decode().isprintable() else f"hex:{self.hex()}"

    @classmethod
    def read(cls, text: str) -> Delimiter:
        if not text:
            raise ValueError(
                "it has no bytes; leave the option out to read messages of one frame as they are"
            )
        return cls(_bytes_of(text))


class Location(str):
    """A path or URI. ``str()`` hides its credentials; only ``with_credentials`` has them."""

    words: ClassVar[str] = "a path or URI"

    # The parameters of a URI that are shown. Those of Azure may be secrets.
    _shown: ClassVar[set[str]] = {
        "scheme",
        "region",
        "endpoint_override",
        "allow_bucket_creation",
        "allow_delayed_open",
    }

    @property
    def with_credentials(self) -> str:
        return str.__str__(self)

    def __str__(self) -> str:
        if "://" not in self.with_credentials:
            return self.with_credentials
        address, mark, parameters = re.sub("://.*@", "://***@", self.with_credentials).partition("?")
        named = (each.partition("=") for each in parameters.split("&"))
        shown = (
            f"{name}={value if name in self._shown else '***'}" if sign else name
            for name, sign, value in named
        )
        return address + mark + "&".join(shown)

    def __repr__(self) -> str:
        return repr(str(self))

    def __format__(self, spec: str) -> str:
        return format(str(self), spec)

    @classmethod
    def read(cls, text: str) -> Location:
        return cls(text)


class StoreLocation(Location):
    """A URI of object storage."""

    words: ClassVar[str] = "a URI"


class LocalPath(str):
    """An absolute path, or a ``file:`` URI of one, which means the same in each process."""

    words: ClassVar[str] = "an absolute path"

    @classmethod
    def read(cls, text: str) -> LocalPath:
        scheme, colon, _ = text.partition(":")
        if colon and re.fullmatch("[A-Za-z][A-Za-z0-9+.-]*", scheme):
            if scheme.lower() == "dbfs":
                raise ValueError(
                    "on Databricks name a local directory of the driver (/local_disk0/...), and set walStore"
                )
            if scheme.lower() != "file":
                raise ValueError(
                    "only local or shared (NFS) directories are supported, as an absolute path or a file: URI; not "
                    f"{scheme}:"
                )
            parts = urlsplit(text)
            if parts.netloc not in ("", "localhost"):
                raise ValueError(f"a file: URI has three slashes, as in file:///{parts.netloc}{parts.path}")
            text = unquote(parts.path)
        if not text.startswith("/"):
            raise ValueError(
                "it must be an absolute path, as in /data/wal, or a file: URI: each process of Spark has a working "
                "directory of its own"
            )
        return cls(text)


class Duration(float):
    """Seconds, read from a number with a unit: ``500ms``, ``10s``, ``15 minutes``."""

    words: ClassVar[str] = "a duration"

    def __str__(self) -> str:
        return humanfriendly.format_timespan(float(self)) if self else "0s"

    @classmethod
    def read(cls, text: str) -> Duration:
        try:
            if not re.search("[a-zA-Z]", text):
                raise humanfriendly.InvalidTimespan("no unit")
            return cls(humanfriendly.parse_timespan(text))
        except humanfriendly.InvalidTimespan:
            raise ValueError("a duration is a number and a unit: 500ms, 10s, 5 minutes") from None


# libzmq has a C int for milliseconds. This limit is one second less, so that a sum of waits fits, too.
MOST_MILLISECONDS = 2**31 - 1 - 1000


class Linger(int):
    """libzmq's linger in milliseconds, as a plain number (-1: without a limit) or with a unit."""

    words: ClassVar[str] = "milliseconds"

    def __str__(self) -> str:
        return f"{int(self)} ms"

    @classmethod
    def read(cls, text: str) -> Linger:
        millis = int(text) if re.fullmatch(r"-?\d+", text) else round(Duration.read(text) * 1000)
        if millis < -1:
            raise ValueError("linger is -1 (without a limit), 0 or more milliseconds")
        if millis > MOST_MILLISECONDS:
            raise ValueError(f"libzmq waits {MOST_MILLISECONDS} ms (24 days) at most")
        return cls(millis)


class ByteSize(int):
    """Bytes, read from ``1048576``, ``64m`` or ``4 GiB``. Units are powers of 1024, as in Spark."""

    words: ClassVar[str] = "a size"

    def __str__(self) -> str:
        return str(humanfriendly.format_size(int(self), binary=True))

    @classmethod
    def read(cls, text: str) -> ByteSize:
        try:
            size = cls(humanfriendly.parse_size(text, binary=True))
        except humanfriendly.InvalidSize as e:
            raise ValueError("a size is a number of bytes, or has a unit: 64m, 4 GiB") from e
        if size < 1:
            raise ValueError("a size is at least 1 byte")
        return size


class Topics(tuple[str, ...]):
    """Topic prefixes, separated by commas.

    ``hex:`` and digits are bytes that need not be UTF-8, as in the column ``topic``, or that contain a comma.
    """

    words: ClassVar[str] = "topics"

    def __str__(self) -> str:
        return ",".join(self)

    @property
    def prefixes(self) -> list[bytes]:
        """The prefixes as a socket subscribes to them."""
        return [_bytes_of(topic) for topic in self]

    @classmethod
    def read(cls, text: str) -> Topics:
        if text.lstrip().startswith('["'):
            raise ValueError(
                'topics are separated by commas, as in a,b; one that begins with [" is written in hex:'
            )
        topics = cls(dict.fromkeys(part.strip() for part in text.split(",")))
        for topic in topics:
            _bytes_of(topic)
        return topics


def _bytes_of(text: str) -> bytes:
    try:
        if not text.startswith("hex:"):
            return text.encode()
        if found := bytes.fromhex(text.removeprefix("hex:")):
            return found
    except UnicodeEncodeError:
        raise ValueError(f"{text!r} is no text; write bytes that are not UTF-8 as in hex:ff00") from None
    except ValueError:
        pass
    raise ValueError(
        f"after hex: come pairs of hexadecimal digits, as in hex:ff00; text that itself begins with hex: is "
        f"hex:{text.encode(errors='replace').hex()}"
    )


_EPOCH = datetime.fromtimestamp(0, UTC)


class Timestamp(int):
    """A time in microseconds since the epoch, read from ISO 8601 with a time zone."""

    words: ClassVar[str] = "a time"

    def __str__(self) -> str:
        return (_EPOCH + timedelta(microseconds=int(self))).isoformat()

    @classmethod
    def read(cls, text: str) -> Timestamp:
        try:
            read = datetime.fromisoformat(text)
        except ValueError:
            raise ValueError("a time looks like 2026-11-22T10:00:00Z") from None
        if read.tzinfo is None:
            raise ValueError(
                f"it has no time zone; write {read.isoformat()}Z for UTC, or as in {read.isoformat()}+01:00"
            )
        time = cls((read - _EPOCH) // timedelta(microseconds=1))
        if time < 0:
            raise ValueError("it is before 1970")
        return time
