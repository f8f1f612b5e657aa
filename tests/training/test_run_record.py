"""What a start leaves for others to read lets nobody in."""

from __future__ import annotations

import pytest

from smp.training.run_record import without_credentials


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("https://me:secret@h/x.jsonl", "https://***@h/x.jsonl"),
        ("--data-path '0.3 https://h/x?sig=1&b=2 0.7 s3://b/y'", "--data-path '0.3 https://h/x?*** 0.7 s3://b/y'"),
        ("s3://b/x?.jsonl", "s3://b/x?.jsonl"),
        ("abfs://box@account.host/x", "abfs://box@account.host/x"),
        ("hub:me/data@v2 a@b", "hub:me/data@v2 a@b"),
        (("https://t@h/a", 1), ("https://***@h/a", 1)),
        (None, None),
    ],
)
def test_urls_lack_user_password_and_query(given: object, kept: object) -> None:
    assert without_credentials(given) == kept
