"""Names of new run folders."""

from __future__ import annotations

import time

from agro.io.files import new_run_folder


def test_runs_of_one_second_have_folders_of_their_own(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "strftime", lambda _: "20261122-191204")
    names = []
    for _ in range(3):
        folder = new_run_folder()
        folder.mkdir(parents=True)
        names.append(folder.name)
    assert names == ["20261122-191204", "20261122-191204-2", "20261122-191204-3"]
