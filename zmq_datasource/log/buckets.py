"""Reads the URI of a bucket for ``obstore``.

The forms are those of pyarrow's file systems:

* ``s3://[key:secret@]bucket/prefix`` with ``region``, ``endpoint_override``, ``scheme``;
* ``gs://[anonymous@]bucket/prefix`` with ``endpoint_override``, ``scheme``;
* ``abfs://container[:key]@account.dfs.core.windows.net/prefix``, also ``abfss://``, or the parameters of a SAS token.

All else is read from the environment (``AWS_ACCESS_KEY_ID``, ``AWS_VIRTUAL_HOSTED_STYLE_REQUEST``,
``GOOGLE_APPLICATION_CREDENTIALS``, ``AZURE_STORAGE_ACCOUNT_KEY``, ``AZURE_STORAGE_ENDPOINT`` and the others that
``obstore`` reads) or comes from the machine's role in its cloud.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Self
from urllib.parse import SplitResult, parse_qsl, quote, unquote, urlsplit

from zmq_datasource.errors import OptionError
from zmq_datasource.options.types import Location

_DFS = ".dfs.core.windows.net"
_QUERY = re.compile(r"\?[^\s\"]+")


class Bucket(NamedTuple):
    """A bucket, and a prefix in it.

    Attributes:
        kind: The name of obstore's class.
        bucket: The bucket's name.
        prefix: The prefix of all keys; empty for none.
        config: The configuration for that class.
        secrets: Texts that no message may show.
    """

    kind: str
    bucket: str
    prefix: str
    config: Mapping[str, Any]
    secrets: tuple[str, ...]

    def __repr__(self) -> str:
        return f"Bucket({self.kind!r}, {self.bucket!r}, {self.prefix!r})"

    @classmethod
    def read(cls, location: Location) -> Self:
        """Read a URI.

        Raises:
            OptionError: It is not the URI of a bucket, or has an unknown parameter.
        """
        try:
            parts = _split(location.with_credentials)
            parameters = dict(parse_qsl(parts.query, keep_blank_values=True))
            secrets = [parameters.get("sig", "")]
            if parts.password:
                secrets += [unquote(parts.username or ""), unquote(parts.password)]
            reader = _READERS.get(parts.scheme)
            if reader is None:
                raise ValueError(
                    f"it must be a URI of a bucket ({', '.join(_READERS)}); for a directory use walLocation"
                )
            kind, bucket, path, config = reader(parts, parameters)
            if not bucket:
                raise ValueError("it names no bucket")
            if parameters:
                raise ValueError(f"unknown parameter {', '.join(sorted(parameters))}")
        except ValueError as e:
            raise OptionError(f"option walStore={location!r}: {e}") from None
        return cls(
            kind,
            bucket,
            unquote(path).strip("/"),
            {name: value for name, value in config.items() if value is not None},
            tuple(filter(None, secrets)),
        )

    def connect(self, **options: Any) -> Any:
        """Create an obstore store. Raises obstore's errors."""
        options["client_options"]["allow_http"] = True
        made = getattr(import_obstore().store, self.kind)
        return made(self.bucket, prefix=self.prefix or None, config=dict(self.config), **options)

    def without_secrets(self, text: str) -> str:
        """Remove the secrets from a message of obstore, for a log."""
        text = _QUERY.sub("?***", text)
        for secret in self.secrets:
            for form in (secret, quote(secret, safe="")):
                text = text.replace(form, "***")
        return text


_Read = tuple[str, str, str, dict[str, Any]]


def _read_s3(parts: SplitResult, parameters: dict[str, str]) -> _Read:
    config = {
        "access_key_id": unquote(parts.username) if parts.username else None,
        "secret_access_key": unquote(parts.password) if parts.password else None,
        "region": parameters.pop("region", None),
        "endpoint": _endpoint(parameters),
        "disable_bulk_delete": "true",  # deletes single objects: some servers that imitate S3 have no bulk delete
    }
    return "S3Store", parts.netloc.rpartition("@")[2], parts.path, config


def _read_google(parts: SplitResult, parameters: dict[str, str]) -> _Read:
    config = {
        "base_url": _endpoint(parameters),
        "skip_signature": "true" if parts.username == "anonymous" else None,
    }
    return "GCSStore", parts.netloc.rpartition("@")[2], parts.path, config


def _read_azure(parts: SplitResult, parameters: dict[str, str]) -> _Read:
    host = parts.hostname or ""
    if not host.endswith(_DFS):
        raise ValueError(f"write the account as in abfs://container@account{_DFS}/prefix")
    config = {
        "account_name": host.removesuffix(_DFS),
        "account_key": unquote(parts.password) if parts.password else None,
    }
    if "sig" in parameters:
        config["sas_key"] = "&".join(f"{name}={quote(value, safe='')}" for name, value in parameters.items())
        parameters.clear()
    return "AzureStore", unquote(parts.username or ""), parts.path, config


def _endpoint(parameters: dict[str, str]) -> str | None:
    scheme, endpoint = parameters.pop("scheme", "https"), parameters.pop("endpoint_override", None)
    if scheme not in ("http", "https"):
        raise ValueError("the parameter scheme must be http or https")
    return endpoint if endpoint is None or "://" in endpoint else f"{scheme}://{endpoint}"


def _split(uri: str) -> SplitResult:
    try:
        parts = urlsplit(uri)
    except ValueError:  # its text would show the URI
        raise ValueError("it is not a URI") from None
    if "@" in parts.path:
        raise ValueError("write a / in a key or secret as %2F")
    return parts


_READERS: Mapping[str, Callable[[SplitResult, dict[str, str]], _Read]] = {
    "s3": _read_s3,
    "gs": _read_google,
    "abfs": _read_azure,
    "abfss": _read_azure,
}


def import_obstore() -> Any:
    """The package obstore, which is an extra.

    Raises:
        OptionError: It is not installed.
    """
    try:
        import obstore  # noqa: PLC0415 - an extra
        import obstore.store  # noqa: PLC0415
    except ImportError as e:
        raise OptionError('a log in a bucket needs obstore; pip install "zmq_datasource[bucket]"') from e
    return obstore
