"""Data of a real web server that asks who reads: runs train and go on as with files, and tell nobody the password."""

from __future__ import annotations

import base64
import json
import re
import threading
from collections.abc import Iterator
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from smp.data.files.text_files import expand_paths, read_texts
from smp.data.tuning.files import parse, read_records
from tests.data.shards import DATA, check_streamed, write_shards
from tests.training.flag_runs import Run, run_here
from tests.training.tiny_hf import write_tokenizer

pytest.importorskip("fsspec")
pytest.importorskip("aiohttp")

PASSWORD = "hush5ecret"
TOKENIZER = " --vocab-size 300 --tokenizer-model {}/tokenizer.json"


class Handler(BaseHTTPRequestHandler):
    """Files of ``server.folder`` for those who know the password, or have a signed URL."""

    protocol_version = "HTTP/1.1"
    server: Any

    def log_message(self, *_: object) -> None: ...

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        name, _, query = self.path.partition("?")
        file = self.server.folder / name.lstrip("/")
        basic = "Basic " + base64.b64encode(f"me:{PASSWORD}".encode()).decode()
        known = self.headers.get("Authorization") == basic or query == f"sig={PASSWORD}&for=all"
        content = file.read_bytes() if known and file.is_file() else b""
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "bytes=0-"))
        assert asked is not None
        last = min(int(asked[2] or len(content)), len(content) - 1)
        part = content[int(asked[1]) : last + 1]
        if known and body:
            self.server.sent.append((file.name, len(part), "Range" in self.headers))
        self.send_response(401 if not known else 404 if not file.is_file() else 206 if "Range" in self.headers else 200)
        self.send_header("Content-Length", str(len(part)))
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Range", f"bytes {asked[1]}-{last}/{len(content)}")
        self.send_header("ETag", sha1(content).hexdigest())
        self.end_headers()
        if body:
            self.wfile.write(part)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    made: Any = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made.folder, made.sent = tmp_path_factory.mktemp("served"), []
    thread = threading.Thread(target=made.serve_forever, daemon=True)
    thread.start()
    yield made
    made.shutdown()
    made.server_close()
    thread.join()


def told(folder: Path, runs: list[Run]) -> list[str]:
    """Where the password stands: in what runs printed, or in a file that they left."""
    printed = [f"{run.folder}: output" for run in runs if PASSWORD in run.out + run.err]
    files = (path for path in folder.rglob("*") if path.is_file())
    return printed + [str(path) for path in files if PASSWORD.encode() in path.read_bytes()]


def test_shards_are_streamed_and_a_resume_is_exact(server: Any, tmp_path: Path) -> None:
    write_shards(server.folder)
    host = f"127.0.0.1:{server.server_port}"
    runs = check_streamed(tmp_path, server.folder, f"http://me:{PASSWORD}@{host}")
    tokens = [(size, ranged) for name, size, ranged in server.sent if name.endswith(".bin")]
    assert tokens and all(ranged for _, ranged in tokens), "a sample's tokens are a range of the file"
    assert max(size for size, _ in tokens) <= 2 * 18
    assert told(tmp_path, runs) == []
    assert f"http://***@{host}/a" in (tmp_path / "whole/logs/starts.jsonl").read_text()
    manifests = [path.read_text() for path in (tmp_path / "checkpoints").rglob("manifest.json")]
    assert manifests and all(f"http://***@{host}/a" in text for text in manifests)


def test_what_is_refused_and_shown_has_no_password(server: Any, tmp_path: Path) -> None:
    write_shards(server.folder)
    host = f"127.0.0.1:{server.server_port}"
    recipe = run_here(
        tmp_path / "dry", f"--data-path http://me:{PASSWORD}@{host}/a --data-cache-path c --dry-run", base=DATA
    )
    assert recipe.code == 0 and f"http://***@{host}/a" in recipe.out
    assert recipe.out.splitlines()[-1] == "# *** stands for credentials in URLs: put them in to train with this"
    plain = run_here(tmp_path / "plain", "--dry-run")
    assert "***" not in plain.out
    wrong = f"--data-path http://me:{PASSWORD}x@{host}/a --data-cache-path c --status-file status.json"
    refused = run_here(tmp_path / "wrong", wrong, base=DATA)
    assert refused.code and len(refused.errors) == 1
    assert f"http://***@{host}/a.bin: the server answers 401" in refused.errors[0]
    assert "401" in (tmp_path / "wrong/status.json").read_text()
    runs = [recipe, refused]
    write_tokenizer(tmp_path)
    text = f"--data-path http://me:{PASSWORD}{{}}@{host}/gone.jsonl --data-cache-path c"
    for word, why in (("", "no such file"), ("x", "the server answers 401")):
        runs.append(run_here(tmp_path / f"text{word}", text.format(word) + TOKENIZER.format(tmp_path), base=DATA))
        assert f"error: http://***@{host}/gone.jsonl: {why}" in runs[-1].errors[0]
    assert told(tmp_path, runs) == []


def test_text_behind_a_signed_url(server: Any, tmp_path: Path) -> None:
    rows = [{"text": f"what is {i}?"} for i in range(40)]
    (server.folder / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (server.folder / "bad.jsonl").write_text('{"text": "x"}\n{"text": 1}\n')
    url, shown = (
        f"http://127.0.0.1:{server.server_port}/{{}}.jsonl?{query}" for query in (f"sig={PASSWORD}&for=all", "***")
    )
    assert list(read_texts(expand_paths([url.format("x")]), "text")) == [row["text"] for row in rows]
    read = list(read_records([url.format("x")]))
    assert [parse(record) for _, record in read] == rows and read[2][0] == shown.format("x") + ":3"
    write_tokenizer(tmp_path)
    flags = f"--data-cache-path cache --train-iters 1{TOKENIZER.format(tmp_path)}"
    runs = [run_here(tmp_path / name, f"{flags} --data-path {url.format(name)}", base=DATA) for name in ("x", "bad")]
    assert runs[0].code == 0 and f"tokenizing {shown.format('x')}" in runs[0].err, runs[0].err
    assert runs[1].code and f"{shown.format('bad')}:2:" in runs[1].errors[0]
    assert told(tmp_path, runs) == []
