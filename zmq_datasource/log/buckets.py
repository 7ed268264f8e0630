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
from collections.abc import Mapping
from typing import Any, NamedTuple, Self
from urllib.parse import SplitResult, parse_qsl, quote, unquote, urlsplit

from zmq_datasource.errors import OptionError
from zmq_datasource.options.types import Location

_AZURE = ".dfs.core.windows.net"
_QUERY = re.compile(r"\?[^\s\"]+")


class Bucket(NamedTuple):
    """A bucket, and a prefix in it.

    Attributes:
        url: Both, for ``obstore``, without credentials and parameters.
        config: The configuration of obstore's store.
        secrets: Texts that no message may show.
    """

    url: str
    config: Mapping[str, str]
    secrets: tuple[str, ...]

    def __repr__(self) -> str:
        return f"Bucket({self.url!r})"

    @classmethod
    def read(cls, location: Location) -> Self:
        """Read a URI.

        Raises:
            OptionError: It is not the URI of a bucket, or has an unknown parameter.
        """
        try:
            parts = _split(location.with_credentials)
            parameters = dict(parse_qsl(parts.query, keep_blank_values=True))
            user, password = unquote(parts.username or ""), unquote(parts.password or "")
            secrets = (parameters.get("sig", ""), password, password and user)
            place = parts.netloc.rpartition("@")[2]
            match parts.scheme:
                case "s3":
                    config = {
                        "access_key_id": user,
                        "secret_access_key": password,
                        "region": parameters.pop("region", ""),
                        "endpoint": _endpoint(parameters),
                        # Deletes single objects: some servers that imitate S3 have no bulk delete.
                        "disable_bulk_delete": "true",
                    }
                case "gs":
                    signs = user != "anonymous"
                    config = {"base_url": _endpoint(parameters), "skip_signature": "" if signs else "true"}
                case "abfs" | "abfss":
                    if not place.endswith(_AZURE):
                        raise ValueError(f"write the account as in abfs://container@account{_AZURE}/prefix")
                    place = f"{user}@{place}"
                    config = {"account_key": password, "sas_key": _token(parameters)}
                case _:
                    raise ValueError(
                        "it must be a URI of a bucket (s3, gs, abfs, abfss); for a directory use walLocation"
                    )
            if not place or place[0] == "@":
                raise ValueError("it names no bucket")
            if parameters:
                raise ValueError(f"unknown parameter {', '.join(sorted(parameters))}")
        except ValueError as e:
            raise OptionError(f"option walStore={location!r}: {e}") from None
        given = {name: value for name, value in config.items() if value}
        return cls(f"{parts.scheme}://{place}{parts.path}", given, tuple(filter(None, secrets)))

    def connect(self, **options: Any) -> Any:
        """Create an obstore store. Raises obstore's errors."""
        options["client_options"]["allow_http"] = True
        return import_obstore().store.from_url(self.url, config=dict(self.config), **options)

    def without_secrets(self, text: str) -> str:
        """Remove the secrets from a message of obstore, for a log."""
        text = _QUERY.sub("?***", text)
        for secret in self.secrets:
            for form in (secret, quote(secret, safe="")):
                text = text.replace(form, "***")
        return text


def _endpoint(parameters: dict[str, str]) -> str:
    """Take the server out of the parameters; empty for none."""
    scheme, endpoint = parameters.pop("scheme", "https"), parameters.pop("endpoint_override", "")
    if scheme not in ("http", "https"):
        raise ValueError("the parameter scheme must be http or https")
    return endpoint if not endpoint or "://" in endpoint else f"{scheme}://{endpoint}"


def _token(parameters: dict[str, str]) -> str:
    """Take the SAS token out of the parameters, all of which are then its own; empty for none."""
    if "sig" not in parameters:
        return ""
    token = "&".join(f"{name}={quote(value, safe='')}" for name, value in parameters.items())
    parameters.clear()
    return token


def _split(uri: str) -> SplitResult:
    try:
        parts = urlsplit(uri)
    except ValueError:  # its text would show the URI
        raise ValueError("it is not a URI") from None
    if "@" in parts.path:
        raise ValueError("write a / in a key or secret as %2F")
    return parts


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
