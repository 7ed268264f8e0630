"""What a URI of a bucket says."""

from __future__ import annotations

import os
from typing import Any

import pytest

from zmq_datasource.errors import OptionError
from zmq_datasource.log.buckets import Bucket
from zmq_datasource.options.types import Location

ACCOUNT = {"container_name": "container", "account_name": "account"}


@pytest.mark.parametrize(
    ("uri", "kind", "prefix", "config"),
    [
        ("s3://bucket", "S3Store", None, {"bucket": "bucket"}),
        ("s3://bucket/a%20b/c/", "S3Store", "a b/c", {"bucket": "bucket"}),
        (
            "s3://AK:se%2Fcret@My.Bucket/a?region=eu-1&endpoint_override=host%3A9&scheme=http",
            *("S3Store", "a"),
            {
                **{"bucket": "My.Bucket", "access_key_id": "AK", "secret_access_key": "se/cret"},
                **{"region": "eu-1", "endpoint": "http://host:9"},
            },
        ),
        ("gs://bucket/a", "GCSStore", "a", {"bucket": "bucket"}),
        (
            "gs://anonymous@bucket/a?endpoint_override=host:1&scheme=http",
            *("GCSStore", "a"),
            {"bucket": "bucket", "base_url": "http://host:1", "skip_signature": "true"},
        ),
        ("abfs://container@account.dfs.core.windows.net/a/b", "AzureStore", "a/b", ACCOUNT),
        (
            "abfss://container:a2V5@account.dfs.core.windows.net/a",
            *("AzureStore", "a"),
            {**ACCOUNT, "account_key": "a2V5"},
        ),
        (
            "abfs://container@account.dfs.core.windows.net/a?sv=2021&sig=abc%2Fd%3D&se=x",
            *("AzureStore", "a"),
            {**ACCOUNT, "sas_key": "sv=2021&sig=abc%2Fd%3D&se=x"},
        ),
    ],
)
def test_a_uri_is_read_as_pyarrow_reads_it(
    uri: str, kind: str, prefix: str | None, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith(("AWS_", "GOOGLE_", "AZURE_"))]:
        monkeypatch.delenv(name)
    found = Bucket.read(Location(uri)).connect(client_options={}, retry_config={})
    assert (type(found).__name__, found.prefix) == (kind, prefix)
    assert {name: value for name, value in found.config.items() if name != "disable_bulk_delete"} == config


@pytest.mark.parametrize(
    ("uri", "match"),
    [
        ("s3://bucket/a?bogus=hidden&region=x", "unknown parameter bogus$"),
        ("gs://bucket/a?project=hidden", "unknown parameter project$"),
        ("s3://bucket/a?scheme=ftp", "scheme must be http or https"),
        ("s3://key:hidden/hidden@bucket/a", "as %2F"),
        ("s3://[hidden@bucket/a", "it is not a URI"),
        ("s3:///a", "names no bucket"),
        ("abfs://account.dfs.core.windows.net/a", "names no bucket"),
        ("abfs://account@container/a", "write the account as in abfs://container@account"),
        ("http://bucket/a", "must be a URI of a bucket"),
        ("file:///a/directory", "must be a URI of a bucket.* for a directory use walLocation"),
    ],
)
def test_a_uri_of_no_bucket_is_refused_without_a_secret(uri: str, match: str) -> None:
    with pytest.raises(OptionError, match=match) as raised:
        Bucket.read(Location(uri))
    assert "hidden" not in str(raised.value)


def test_a_message_shows_no_secret() -> None:
    found = Bucket.read(Location("s3://AKIA:se%2Fcret@bucket/a"))
    text = found.without_secrets("PUT http://AKIA/bucket?X-Amz-Signature=12 se/cret se%2Fcret refused")
    assert text == "PUT http://***/bucket?*** *** *** refused"
    assert "cret" not in repr(found)
    with_token = Bucket.read(
        Location("abfs://container@account.dfs.core.windows.net/a?sv=2021&sig=abc%2Fd%3D")
    )
    assert "abc" not in with_token.without_secrets("sig=abc%2Fd%3D or abc/d=")
