"""Reads the URI of a bucket for ``obstore``.

The forms are those of pyarrow's file systems:

* ``s3://[key:secret@]bucket/prefix`` with ``region``, ``endpoint_override``, ``scheme``, ``force_virtual_addressing``;
* ``gs://[anonymous@]bucket/prefix``, also ``gcs://``, with ``endpoint_override``, ``scheme``;
* ``abfs://container[:key]@account.dfs.core.windows.net/prefix``,
  ``abfs://[:key@]account.blob.core.windows.net/container/prefix`` and ``abfs://account[:key]@container/prefix``, also
  ``abfss://``, with ``tenant_id``, ``client_id``, ``client_secret``, ``blob_storage_authority``,
  ``blob_storage_scheme``, or the parameters of a SAS token.

Credentials that are not in the URI are read from the environment (``AWS_ACCESS_KEY_ID``,
``GOOGLE_APPLICATION_CREDENTIALS``, ``AZURE_STORAGE_ACCOUNT_KEY`` and the others that ``obstore`` reads) or come from
the machine's role in its cloud.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Self
from urllib.parse import SplitResult, parse_qsl, quote, unquote, urlsplit

from zmq_datasource.errors import OptionError
from zmq_datasource.options.types import Location

_DFS, _BLOB = ".dfs.core.windows.net", ".blob.core.windows.net"
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
            secrets = [parameters.get(name, "") for name in ("sig", "client_secret")]
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
    bucket, scheme = parts.netloc.rpartition("@")[2], _scheme(parameters)
    endpoint = parameters.pop("endpoint_override", None)
    virtual = parameters.pop("force_virtual_addressing", "false") == "true"
    if endpoint is not None and "://" not in endpoint:
        endpoint = f"{scheme}://{f'{bucket}.' if virtual else ''}{endpoint}"
    config = {
        "access_key_id": unquote(parts.username) if parts.username else None,
        "secret_access_key": unquote(parts.password) if parts.password else None,
        "region": parameters.pop("region", None),
        "endpoint": endpoint,
        "virtual_hosted_style_request": "true" if virtual else None,
        "disable_bulk_delete": "true",  # deletes single objects: some servers that imitate S3 have no bulk delete
    }
    return "S3Store", bucket, parts.path, config


def _read_google(parts: SplitResult, parameters: dict[str, str]) -> _Read:
    scheme, endpoint = _scheme(parameters), parameters.pop("endpoint_override", None)
    config = {
        "base_url": None if endpoint is None else f"{scheme}://{endpoint}",
        "skip_signature": "true" if parts.username == "anonymous" else None,
    }
    return "GCSStore", parts.netloc.rpartition("@")[2], parts.path, config


def _read_azure(parts: SplitResult, parameters: dict[str, str]) -> _Read:
    host, user, path = parts.hostname or "", unquote(parts.username or ""), parts.path
    if host.endswith(_DFS) and user:
        account, container = host.removesuffix(_DFS), user
    elif host.endswith((_DFS, _BLOB)):
        account = host.removesuffix(_DFS).removesuffix(_BLOB)
        container, _, path = path.lstrip("/").partition("/")
    else:
        account, container = user, host
    authority = parameters.pop("blob_storage_authority", None)
    scheme = parameters.pop("blob_storage_scheme", "https")
    config = {
        "account_name": account or None,
        "account_key": unquote(parts.password) if parts.password else None,
        "endpoint": None if authority is None else f"{scheme}://{authority}/{account}",
        **{name: parameters.pop(name, None) for name in ("tenant_id", "client_id", "client_secret")},
    }
    if "sig" in parameters:
        config["sas_key"] = "&".join(f"{name}={quote(value, safe='')}" for name, value in parameters.items())
        parameters.clear()
    return "AzureStore", container, path, config


def _split(uri: str) -> SplitResult:
    try:
        parts = urlsplit(uri)
    except ValueError:  # its text would show the URI
        raise ValueError("it is not a URI") from None
    if "@" in parts.path:
        raise ValueError("write a / in a key or secret as %2F")
    return parts


def _scheme(parameters: dict[str, str]) -> str:
    scheme = parameters.pop("scheme", "https")
    if scheme not in ("http", "https"):
        raise ValueError("the parameter scheme must be http or https")
    return scheme


_READERS: Mapping[str, Callable[[SplitResult, dict[str, str]], _Read]] = {
    "s3": _read_s3,
    "gs": _read_google,
    "gcs": _read_google,
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
