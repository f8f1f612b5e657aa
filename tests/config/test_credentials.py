"""What others may read lets nobody in."""

from __future__ import annotations

import pytest

from smp.config.command_line.credentials import without_credentials


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("https://me:secret@h/x.jsonl", "https://***@h/x.jsonl"),
        ("https://me:se'c\"ret@h/x https://t@h:80/y", "https://***@h/x https://***@h:80/y"),
        ("--data-path '0.3 https://h/x?sig=1&b=2 0.7 s3://b/y'", "--data-path '0.3 https://h/x?*** 0.7 s3://b/y'"),
        ("(https://h/x?sig=a/b+c==): no such file", "(https://h/x?***): no such file"),
        ("https://h/x.jsonl?sig=1:17: not JSON", "https://h/x.jsonl?***:17: not JSON"),
        ("https://me:se#cret@h/x.jsonl", "https://***@h/x.jsonl"),
        ("https://me:p@ss@h/x", "https://***@h/x"),
        ("s3://b/x?.jsonl", "s3://b/x?.jsonl"),
        ("abfs://box@account.host/x https://a:b@h/y", "abfs://box@account.host/x https://***@h/y"),
        ("hub:me/data@v2 a@b", "hub:me/data@v2 a@b"),
        (("https://t@h/a", 1), ("https://***@h/a", 1)),
        (None, None),
    ],
)
def test_urls_lack_user_password_and_query(given: object, kept: object) -> None:
    assert without_credentials(given) == kept
