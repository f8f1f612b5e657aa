"""Preprocessing: whatever ends a job, at any moment, it goes on where it was, and no other job does."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tokenizers

import smp.data.files.text_files as text_files
import smp.data.indexed_dataset as indexed_dataset
import smp.data.job_output as job_output
import smp.data.preprocess as preprocess_module
from smp.config.command_line.command import DamageError
from smp.data.job_output import Output
from smp.data.preprocess import Encoder, preprocess
from smp.data.tokenizers.files import load_tokenizer, tokenizer_key
from tests.data.text_jobs import KINDS, TEXTS, bytes_of, lines, run, texts_in, write

pytestmark = pytest.mark.usefixtures("small_chunks")


def in_parts_of(patch: pytest.MonkeyPatch, chunks: int) -> None:
    for module in (job_output, preprocess_module):
        patch.setattr(module, "PART_CHUNKS", chunks)


class Killed(BaseException):
    """Stands for the end of the process: nothing handles it."""


def raise_killed(output: Output) -> None:
    raise Killed


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("after", [1, 4, 9])
def test_a_job_goes_on_where_it_was_killed(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch, name: str, after: int
) -> None:
    inputs = [write(tmp_path / name, TEXTS), write(tmp_path / f"b{name}", TEXTS[::-1])]
    run(tmp_path, model, inputs, name="whole")
    add, count = Output.add, iter(range(100))

    def dying(self: Output, encoded: job_output.Encoded) -> None:
        if next(count) == after:
            (self.folder / "part.tmp").write_bytes(b"rubbish")  # was on its way when the process died
            raise Killed
        add(self, encoded)

    in_parts_of(monkeypatch, 2)
    with monkeypatch.context() as patch:
        patch.setattr(Output, "add", dying)
        with pytest.raises(Killed):
            run(tmp_path, model, inputs)
    assert not (tmp_path / "out.bin").exists() and (tmp_path / "out.partial").exists()
    said: list[str] = []
    encoder = Encoder(model, ("text",), append_eod=True)
    report = preprocess(inputs, str(tmp_path / "out"), [str(tmp_path / "out")], encoder, 1, said.append)
    assert bytes_of(tmp_path) == bytes_of(tmp_path, "whole")
    assert report.resumed_at == after // 2
    assert said == ([f"continuing after {after // 2} parts that are in {tmp_path}/out.partial"] if after > 1 else [])
    assert report.text_bytes == [2 * sum(len(text.encode()) for text in TEXTS)]


def children_of(process: int) -> list[int]:
    """Its workers, and the helper that multiprocessing starts beside them."""
    return [int(word) for word in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def runs(process: int) -> bool:
    """Whether it is there, and not only its exit code."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_killed_process_is_gone_on_with(tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a real kill of a job of two workers, which end with it."""
    source = write(tmp_path / "a.jsonl", TEXTS * 60)
    words = ["--input", source, "--tokenizer-model", model, "--output-prefix", tmp_path / "out", "--workers", "2"]
    code = f"""
import sys
import smp.data.job_output as o, smp.data.preprocess as p, smp.data.files.text_files as t
from tools.preprocess_data import main
if __name__ == "__main__":
    o.PART_CHUNKS, p.PART_CHUNKS, t.CHUNK_BYTES = 2, 2, 200
    main({list(map(str, words))!r})
"""
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    while not list(tmp_path.glob("out.partial/*.npz")):
        assert process.poll() is None
        time.sleep(0.005)
    workers = children_of(process.pid)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not list(tmp_path.glob("out_*")) and len(workers) >= 2
    in_parts_of(monkeypatch, 2)
    prefix, name = str(tmp_path / "out"), str(tmp_path / "out_text_document")
    report = preprocess([source], prefix, [name], Encoder(model, ("text",), append_eod=False), 1)
    assert report.resumed_at > 0
    preprocess([source], str(tmp_path / "w"), [str(tmp_path / "w")], Encoder(model, ("text",), append_eod=False), 1)
    assert bytes_of(tmp_path, "out_text_document") == bytes_of(tmp_path, "w")
    while any(map(runs, workers)):  # the test's timeout is the limit
        time.sleep(0.05)


@pytest.mark.parametrize("call", range(10))
def test_a_kill_while_files_get_their_names(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    """The part gets its name; the tokens and the index of two keys get theirs twice each; the folder is removed."""
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"q": text, "a": text[::-1]}) + "\n" for text in TEXTS))
    encoder, inputs = Encoder(model, ("q", "a"), append_eod=True), [tmp_path / "a.jsonl"]
    whole = [str(tmp_path / f"whole_{key}") for key in "qa"]
    preprocess(inputs, str(tmp_path / "whole"), whole, encoder, 1)
    done = []

    def dying(plain: Callable[..., object], after: bool) -> Callable[..., object]:
        def called(*arguments: object, **options: object) -> object:
            done.append(plain)
            if len(done) == call + 1 and not after:
                raise Killed
            result = plain(*arguments, **options)
            if len(done) == call + 1:
                raise Killed
            return result

        return called

    names = [str(tmp_path / f"out_{key}") for key in "qa"]
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", dying(Path.replace, after=call % 2 == 1))
        patch.setattr(shutil, "rmtree", dying(shutil.rmtree, after=False))
        with pytest.raises(Killed):
            preprocess(inputs, str(tmp_path / "out"), names, encoder, 1)
    report = preprocess(inputs, str(tmp_path / "out"), names, encoder, 1)
    assert report.text_bytes == [sum(len(text.encode()) for text in TEXTS)] * 2
    for key in "qa":
        assert bytes_of(tmp_path, f"out_{key}") == bytes_of(tmp_path, f"whole_{key}")
    assert not (tmp_path / "out.partial").exists()


def test_a_killed_worker_loses_nothing(tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write(tmp_path / "a.jsonl", TEXTS)
    run(tmp_path, model, [source], name="whole")
    add, count = Output.add, iter(range(100))

    def killed(self: Output, encoded: job_output.Encoded) -> None:
        if next(count) == 5:
            raise ChildProcessError("a worker process was killed (out of memory?): try fewer --workers")
        add(self, encoded)

    in_parts_of(monkeypatch, 2)
    with monkeypatch.context() as patch:
        patch.setattr(Output, "add", killed)
        with pytest.raises(OSError, match="a worker process was killed"):
            run(tmp_path, model, [source])
    assert run(tmp_path, model, [source]).resumed_at > 0
    assert bytes_of(tmp_path) == bytes_of(tmp_path, "whole")


def test_bad_input_after_hours_is_gone_on_from(tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job keeps the parts before the bad record; whoever skips it goes on there."""
    (tmp_path / "a.jsonl").write_bytes(lines(TEXTS) + b"{cut\n" + lines(TEXTS))
    said: list[str] = []
    out = str(tmp_path / "out")
    in_parts_of(monkeypatch, 2)
    with pytest.raises(ValueError, match=r"a\.jsonl:62: not valid JSON"):
        preprocess([tmp_path / "a.jsonl"], out, [out], Encoder(model, ("text",), True), 1, said.append)
    parts = len(list(tmp_path.glob("out.partial/*.npz")))
    assert parts > 5
    assert said == [f"{out}.partial keeps {parts} parts: the same command with --on-error skip continues"]
    report = run(tmp_path, model, [tmp_path / "a.jsonl"], skip_bad=True)
    assert report.resumed_at == parts and report.dropped == 1
    assert texts_in(tmp_path, model) == TEXTS * 2


@pytest.mark.parametrize("skip", [False, True])
def test_a_damaged_file_after_hours_leaves_nothing(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch, skip: bool
) -> None:
    """It has to be replaced, and then it is another job."""
    path = write(tmp_path / "a.jsonl.gz", TEXTS)
    path.write_bytes(path.read_bytes()[:-20])
    in_parts_of(monkeypatch, 2)
    said: list[str] = []
    encoder, out = Encoder(model, ("text",), True, skip_bad=skip), str(tmp_path / "out")
    with pytest.raises(ValueError, match="damaged after"):
        preprocess([path], out, [out], encoder, 1, said.append)
    assert said == [] and list(tmp_path.iterdir()) == [path]


def test_another_end_of_a_document_is_another_job(tmp_path: Path) -> None:
    """Which token ends a document stands in a file of its own, beside the tokenizer."""
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "</s>": 1, "<e>": 2}, "a"))
    made.save(str(tmp_path / "tokenizer.json"))
    before = tokenizer_key(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<e>"}')
    assert tokenizer_key(tmp_path / "tokenizer.json") != before
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json: not the settings of a tokenizer"):
        load_tokenizer(tmp_path / "tokenizer.json")


def test_another_job_does_not_go_on_from_there(tmp_path: Path, model: str) -> None:
    with pytest.raises(KeyboardInterrupt), Output(str(tmp_path / "out"), ["n"], np.dtype("<u2"), "one") as output:
        output.parts = 1
        (output.folder / "one-0.npz").touch()
        raise KeyboardInterrupt
    with pytest.raises(ValueError, match=r"out\.partial: left by a job with other input or settings; delete it"):
        Output(str(tmp_path / "out"), ["n"], np.dtype("<u2"), "two")


def test_a_job_of_an_older_version_is_not_mixed_with_parts(tmp_path: Path) -> None:
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial/journal.json").write_text("{}")
    with pytest.raises(ValueError, match=r"out\.partial: left by a job with other input or settings; delete it"):
        Output(str(tmp_path / "out"), ["n"], np.dtype("<u2"), "one")


def test_a_damaged_part_is_named_and_made_again(tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    in_parts_of(monkeypatch, 2)
    source = write(tmp_path / "a.jsonl", TEXTS)
    run(tmp_path, model, [source], name="whole")
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Output, "_publish", raise_killed)
        run(tmp_path, model, [source])
    (first,) = tmp_path.glob("out.partial/*-0.npz")
    data = bytearray(first.read_bytes())
    data[200:210] = bytes(255 - byte for byte in data[200:210])
    first.write_bytes(data)
    with pytest.raises(DamageError, match=r"-0\.npz: damaged; delete it, and the same command makes it again"):
        run(tmp_path, model, [source])
    first.unlink()
    run(tmp_path, model, [source])
    assert bytes_of(tmp_path) == bytes_of(tmp_path, "whole")


def test_two_builders_at_once(tmp_path: Path, model: str) -> None:
    source = write(tmp_path / "a.jsonl", TEXTS)
    with pytest.raises(KeyboardInterrupt), Output(str(tmp_path / "out"), ["n"], np.dtype("<u2"), "one"):
        with pytest.raises(ValueError, match=r"out\.partial: another process is writing"):
            run(tmp_path, model, [source])
        raise KeyboardInterrupt
    assert (tmp_path / "out.partial").exists()  # the refused one removed nothing


def test_a_folder_that_its_job_takes_away_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other job ends between the opening of the lock and the attempt to take it."""
    folder, flock, removed = tmp_path / "out.partial", fcntl.flock, []

    def late(*arguments: object) -> None:
        if not removed:
            removed.append(1)
            shutil.rmtree(folder)
        flock(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(fcntl, "flock", late)
    with pytest.raises(KeyboardInterrupt), Output(str(tmp_path / "out"), ["n"], np.dtype("<u2"), "one"):
        assert (folder / "lock").exists()
        raise KeyboardInterrupt


def test_a_full_disk_leaves_what_can_be_gone_on_with(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write(tmp_path / "a.jsonl", TEXTS)

    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "0.idx")

    with monkeypatch.context() as patch:
        patch.setattr(indexed_dataset, "write_index", full)
        with pytest.raises(OSError, match="No space left on device"):
            run(tmp_path, model, [source])
    assert not list(tmp_path.glob("out.bin")) and (tmp_path / "out.partial").exists()
    run(tmp_path, model, [source])
    assert texts_in(tmp_path, model) == TEXTS


def test_no_room_for_the_tokens_is_one_line(tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system itself refuses: files of this process may not grow beyond 16 KB."""
    source = write(tmp_path / "a.jsonl", TEXTS * 8)
    monkeypatch.setattr(text_files, "CHUNK_BYTES", 2000)
    run(tmp_path, model, [source], name="whole")
    assert (tmp_path / "whole.bin").stat().st_size > 1 << 14
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    in_parts_of(monkeypatch, 2)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 14, limits[1]))
    try:
        with pytest.raises(OSError, match=r"File too large; the same command continues from there: '.*out\.partial'"):
            run(tmp_path, model, [source])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.name for path in tmp_path.glob("out*")] == ["out.partial"]
    assert run(tmp_path, model, [source]).resumed_at > 0
    assert bytes_of(tmp_path) == bytes_of(tmp_path, "whole")
