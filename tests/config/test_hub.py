"""``hub:`` names become folders; what cannot be fetched is one line that says how to."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from smp.config import ConfigError
from smp.config.command_line.cli import read_values
from smp.config.command_line.entry_points import FINETUNE
from smp.config.command_line.hub import on_this_machine

hub = pytest.importorskip("huggingface_hub")
COMMIT = "0123456789" * 4


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """What a stand-in for the download was asked for."""
    out: list[tuple[str, dict[str, Any]]] = []

    def download(name: str, **options: Any) -> str:
        out.append((name, options))
        return f"/cache/{name}"

    monkeypatch.setattr(hub, "snapshot_download", download)
    return out


def test_every_setting_that_names_a_folder_takes_one(asked: list[tuple[str, dict[str, Any]]]) -> None:
    line = "--load hub:me/model@v2 --tokenizer-model hub:me/tok --data-path local.jsonl hub:me/data/train-*.parquet"
    values = read_values(shlex.split(f"{line} --load-adapter hub:me/adapter"), FINETUNE, "")
    assert values["load"] == "/cache/me/model" and values["tokenizer_model"] == "/cache/me/tok"
    assert values["load_adapter"] == "/cache/me/adapter"
    assert shlex.split(values["data_path"]) == ["local.jsonl", "/cache/me/data/train-*.parquet"]
    kinds = {name: (options["repo_type"], options["revision"]) for name, options in asked}
    assert kinds["me/model"] == ("model", "v2") and kinds["me/data"] == ("dataset", None)
    chosen = {name: options["allow_patterns"] for name, options in asked}
    assert chosen["me/data"] == ["train-*.parquet"]
    assert "*.safetensors" in chosen["me/model"] and "*.safetensors" not in chosen["me/tok"]
    ignored = {name: options["ignore_patterns"] for name, options in asked}
    assert ignored["me/model"] and ignored["me/data"] is None  # a data set may well have a folder "original"


def test_other_paths_stay_and_ask_nobody(asked: list[tuple[str, dict[str, Any]]]) -> None:
    assert on_this_machine("folder/hub:x", "model", "--load") == "folder/hub:x"
    with pytest.raises(ConfigError, match=r"^--load hub:a/b/c: expected hub:OWNER/NAME$"):
        on_this_machine("hub:a/b/c", "model", "--load")
    assert not asked


def test_a_folder_of_the_librarys_cache_needs_no_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the library itself, which may not connect here."""
    folder = tmp_path / "models--me--model"
    snapshot = folder / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (folder / "refs").mkdir()
    (folder / "refs/main").write_text(COMMIT)
    download = hub.snapshot_download
    monkeypatch.setattr(
        hub, "snapshot_download", lambda *a, **k: download(*a, **k, cache_dir=tmp_path, local_files_only=True)
    )
    assert Path(on_this_machine("hub:me/model", "model", "--load")) == snapshot
    said = f"note: --load hub:me/model is commit {COMMIT} now; hub:me/model@{COMMIT} stays with it\n"
    assert capsys.readouterr().err == said
    assert Path(on_this_machine(f"hub:me/model@{COMMIT}", "model", "--load")) == snapshot
    assert not capsys.readouterr().err
    with pytest.raises(ConfigError) as error:
        on_this_machine("hub:me/other", "dataset", "--data-path")
    said = str(error.value)
    assert "\n" not in said and said.startswith("--data-path hub:me/other is not on this machine and cannot be fetched")
    assert said.endswith("hf download me/other --repo-type dataset --local-dir FOLDER, then --data-path FOLDER")


def test_without_the_library_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ConfigError, match=r"--load hub:a/b needs huggingface_hub: pip install huggingface_hub"):
        on_this_machine("hub:a/b", "model", "--load")
