"""The folder that the processes of a run share."""

from __future__ import annotations

from pathlib import Path

import pytest

from agro.errors import Refused
from agro.store.shared import LocalFolder, SharedFolder


@pytest.fixture
def shared(tmp_path: Path) -> SharedFolder:
    return LocalFolder(tmp_path)


def write(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"weights" * 1000)
    (folder / "config.json").write_text("{}")


def test_small_files(shared: SharedFolder) -> None:
    assert shared.read("weights/latest.json") is None
    for content in (b"1", b"22", b""):
        shared.write("weights/latest.json", content)
        assert shared.read("weights/latest.json") == content
    shared.remove("weights/latest.json")
    shared.remove("weights/latest.json")
    assert shared.read("weights/latest.json") is None


def test_folders(shared: SharedFolder) -> None:
    assert shared.names("weights") == []
    for version in (10, 2):
        shared.add(f"weights/v{version:02d}", write)
    shared.add("weights/v02", lambda folder: pytest.fail("it is there already"))
    assert shared.names("weights") == ["weights/v02", "weights/v10"]
    with shared.open("weights/v10") as folder:
        assert sorted(file.name for file in folder.iterdir()) == ["config.json", "model.safetensors"]
        assert (folder / "model.safetensors").read_bytes() == b"weights" * 1000
    shared.remove("weights/v10")
    with pytest.raises(Refused, match="v10"), shared.open("weights/v10"):
        pass
