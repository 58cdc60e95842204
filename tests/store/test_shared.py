"""The folder that the processes of a run share: on this host, and at the owner of its store."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from threading import Timer

import pytest
from serving import TOKEN, served

from agro.errors import Refused
from agro.store.serving.http import OwnerHttp
from agro.store.shared import MANIFEST, LocalFolder, RemoteFolder, SharedFolder, beside


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("AGRO_TOKEN", TOKEN)
    with served(tmp_path / "s.db") as url:
        yield url


@pytest.fixture
def http(url: str) -> Iterator[OwnerHttp]:
    with closing(OwnerHttp(url, patience=1.0)) as http:
        yield http


@pytest.fixture(params=["folder", "owner"])
def shared(tmp_path: Path, request: pytest.FixtureRequest) -> SharedFolder:
    if request.param == "folder":
        return LocalFolder(tmp_path / "shared")
    return RemoteFolder(request.getfixturevalue("http"), "run1")


WEIGHTS = bytes(range(256)) * 1000


def write(folder: Path) -> None:
    (folder / "chat").mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(WEIGHTS)
    (folder / "chat" / "tools.jinja").write_text("")


def test_small_files(shared: SharedFolder) -> None:
    assert shared.read("weights/latest.json") is None
    for content in (b"1", b"22", b""):
        shared.write("weights/latest.json", content)
        assert shared.read("weights/latest.json") == content
    shared.remove("weights/latest.json")
    shared.remove("weights/latest.json")
    assert shared.read("weights/latest.json") is None


def test_a_file_is_waited_for_until_it_is_another_one(shared: SharedFolder) -> None:
    """A second where nothing is written; not at all where it is another one; else until it is written."""
    shared.write("latest.json", b"1")
    began = time.monotonic()
    shared.wait("latest.json", b"1", 1.0)
    assert 0.9 <= time.monotonic() - began < 8
    began = time.monotonic()
    shared.wait("latest.json", b"0", 60.0)
    shared.wait("missing.json", b"0", 60.0)
    other: SharedFolder = shared
    if isinstance(shared, RemoteFolder):  # a connection belongs to one thread
        other = RemoteFolder(OwnerHttp(str(shared)), "run1")
    writer = Timer(0.2, other.write, ["latest.json", b"2"])
    writer.start()
    shared.wait("latest.json", b"1", 60.0)
    assert time.monotonic() - began < 30
    writer.join()
    assert shared.read("latest.json") == b"2"


def test_folders(shared: SharedFolder) -> None:
    assert shared.names("weights") == []
    for version in (10, 2):
        shared.add(f"weights/v{version:02d}", write)
    shared.add("weights/v02", lambda folder: pytest.fail("it is there already"))
    assert shared.names("weights") == ["weights/v02", "weights/v10"]
    with shared.open("weights/v10") as folder:
        assert (folder / "model.safetensors").read_bytes() == WEIGHTS
        assert (folder / "chat" / "tools.jinja").read_bytes() == b""
    shared.remove("weights/v10")
    with pytest.raises(Refused, match="v10"), shared.open("weights/v10"):
        pass


def test_weights_travel_in_pieces_and_are_files_beside_the_store(
    tmp_path: Path, http: OwnerHttp, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agro.store.shared.PIECE_BYTES", 1000)  # 256 pieces
    shared = RemoteFolder(http, "run1")
    shared.add("weights/v1", write)
    file = beside(tmp_path / "s.db") / "run1" / "weights" / "v1" / "model.safetensors"
    assert file.read_bytes() == WEIGHTS
    with shared.open("weights/v1") as folder:
        assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    file.write_bytes(WEIGHTS[:-1] + b"!")
    with pytest.raises(Refused, match=r"model\.safetensors: arrived damaged"), shared.open("weights/v1"):
        pass
    file.unlink()  # as when it makes room for a newer version
    with pytest.raises(Refused, match="it was removed"), shared.open("weights/v1"):
        pass


def test_a_folder_is_missing_until_all_of_it_has_arrived(tmp_path: Path, http: OwnerHttp) -> None:
    """A trainer was killed while it uploaded; the next one begins again, with another file."""
    piece = {"headers": {"x-sha256": hashlib.sha256(b"half").hexdigest()}}
    names = {"file": "model.safetensors", "offset": "0"}
    shared = RemoteFolder(http, "run1")
    for _ in range(2):  # a request whose answer was lost is sent again
        http.send("PUT", "/shared/run1/pieces/weights/v1", b"half", params=names, **piece)
    assert shared.names("weights") == []
    manifest = {"model.safetensors": {"bytes": 8, "sha256": "0" * 64}}
    with pytest.raises(Refused, match=r"expected .*'bytes': 8.* got .*'bytes': 4"):
        http.send("POST", "/shared/run1/manifests/weights/v1", json.dumps(manifest).encode())
    with pytest.raises(Refused, match="isn't there"), shared.open("weights/v1"):
        pass
    shared.add("weights/v1", write)
    with shared.open("weights/v1") as folder:
        assert (folder / "model.safetensors").read_bytes() == WEIGHTS


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/shared/run1/files/../../s.db", "got 405|expected a path|Not Found|Method"),
        ("/shared/run1/files/a%2F..%2F..%2Fs.json", "expected a path of plain names"),
        ("/shared/run1/files/.hidden.json", "expected a path of plain names"),
        ("/shared/.run/files/a.json", "expected a path of plain names"),
        ("/shared/run1/files/weights.pkl", r"expected a file that is one of \.jinja"),
        ("/shared/run1/files/model.bin", r"expected a file that is one of \.jinja"),
    ],
)
def test_what_is_no_file_of_a_run_is_refused(
    http: OwnerHttp, tmp_path: Path, path: str, message: str
) -> None:
    with pytest.raises(Refused, match=message):
        http.send("PUT", path, b"x")
    assert not any(file.read_bytes() == b"x" for file in tmp_path.rglob("*") if file.is_file())


def test_only_who_has_the_token_is_answered(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGRO_TOKEN", "another")
    with closing(OwnerHttp(url)) as http, pytest.raises(Refused, match="the token isn't the owner's"):
        RemoteFolder(http, "run1").read("config.json")
    monkeypatch.delenv("AGRO_TOKEN")
    with pytest.raises(Refused, match="set AGRO_TOKEN"):
        OwnerHttp(url)


def test_runs_are_listed_by_when_they_began(http: OwnerHttp) -> None:
    assert http.get("/shared") == b"[]"
    for run in ("b", "a", "b"):
        RemoteFolder(http, run).write("config.json", b"{}")
    assert json.loads(http.get("/shared") or b"") == ["a", "b"]


WRONG = r"expected (its files|a path of plain names)"
ENTRY = {"bytes": 1, "sha256": "0" * 64}


@pytest.mark.parametrize(
    "manifest",
    [
        *([], "files", {}, {"model.safetensors": 3}, {"m.json": {"bytes": "1", "sha256": "0"}}),
        *({"../outside.json": ENTRY}, {"/etc/passwd": ENTRY}, {"a/../../b.json": ENTRY}, {".ssh": ENTRY}),
    ],
)
def test_a_manifest_that_leads_elsewhere_is_refused_by_both_sides(
    http: OwnerHttp, tmp_path: Path, manifest: object
) -> None:
    """An owner is believed no more than a client: its files are put where their names say."""
    content = json.dumps(manifest).encode()
    with pytest.raises(Refused, match=WRONG):
        http.send("POST", "/shared/run1/manifests/weights/v1", content)
    folder = beside(tmp_path / "s.db") / "run1" / "weights" / "v1"
    folder.mkdir(parents=True)
    (folder / MANIFEST).write_bytes(content)
    with (
        pytest.raises(Refused, match=WRONG),
        RemoteFolder(http, "run1").open("weights/v1"),
    ):
        pass
