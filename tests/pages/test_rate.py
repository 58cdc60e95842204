"""The page of `agro rate`: clicked through by requests, as a browser sends them, and as one mustn't."""

from __future__ import annotations

import html
import json
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlencode

import pytest
from browser import CONTRAST, Browser

from agro.pages.local_server import behind_a_port, is_name_of
from agro.pages.run.rate import RateServer, Rating
from agro.pages.run.ratings import Answers, Ratings, read_key, read_ratings, read_sheet, write_sheet

ABOUT = {"model": "run/model", "run": "1f", "step": 6, "test": "sequential"}
SCRIPT = "<script>document.title='owned'</script>"
SERVE = """
import sys; from pathlib import Path; from agro.pages.run.rate import RateServer, Rating
run = Path(sys.argv[1])
with RateServer(Rating(run, run / "rate.csv", 6), 0, "127.0.0.1") as server:
    server.serve_until_interrupted(f"{server.listener.getsockname()[1]} {server.token}")
"""


def make_sheet(run: Path, count: int = 20) -> Path:
    answers = [Answers(f"<b>{i}</b>", f"start {i} {SCRIPT}", f"result {i} & more") for i in range(count)]
    answers[1] = Answers("same", "as before", "as before")
    answers[2] = Answers("=1+1", "-2", "=2")
    answers[3] = Answers("reversed", "\u202eevil", "\x1b[31m")
    write_sheet(run / "rate.csv", answers, 0, ABOUT)
    lines = (run / "rate.csv").read_text().split("\n")
    lines[1] += ",a remark beyond the titles"
    (run / "rate.csv").write_text("\n".join(lines))
    return run / "rate.csv"


class Person:
    """Asks a server as a browser does. `sides`: on which side the result is, by row."""

    def __init__(self, port: int, token: str, sheet: Path) -> None:
        self.port, self.token = port, token
        self.sides = [row["result"] for row in read_key(sheet)["rows"]]

    def ask(self, method: str, path: str, body: str = "", **headers: str) -> tuple[int, str]:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request(method, path, body or None, headers)
        answer = connection.getresponse()
        self.headers = answer.headers
        return answer.status, answer.read().decode()

    def page(self) -> str:
        status, text = self.ask("GET", f"/?token={self.token}")
        assert status == 200
        return text

    def number(self) -> int | None:
        found = re.search(r'name="number" value="(\d+)"', self.page())
        return int(found[1]) if found else None

    def send(self, origin: str | None = None, **form: object) -> int:
        headers = {"Origin": origin or f"http://127.0.0.1:{self.port}"}
        return self.ask("POST", f"/rate?token={self.token}", urlencode(form), **headers)[0]

    def prefer(self, result: bool) -> None:
        number = self.number()
        assert number is not None
        other = {"left": "right", "right": "left"}
        side = self.sides[number]
        assert self.send(number=number, better=side if result else other[side]) == 303


@pytest.fixture
def person(tmp_path: Path) -> Iterator[Person]:
    sheet = make_sheet(tmp_path)
    with RateServer(Rating(tmp_path, sheet, 6), 0, "127.0.0.1") as server, behind_a_port(server.app) as url:
        yield Person(int(url.rpartition(":")[2]), server.token, sheet)


def status_of(page: str) -> str:
    found = re.search(r'<p class="(?:aside|lead)">(.*?)</p>', page)
    assert found
    return html.unescape(found[1])


def test_ratings_go_on_until_they_decide(person: Person, tmp_path: Path) -> None:
    assert status_of(person.page()) == "Needed: at least 8 more, at most 19: this many pairs are left."
    assert not (tmp_path / "ratings.json").exists()
    person.prefer(result=True)
    assert person.number() == 2  # row 1 has the same answer twice, a tie
    shown = re.findall(r"<pre.*?>\n?(.*?)</pre>", person.page())
    assert (shown[0], sorted(shown[1:])) == ("=1+1", ["-2", "=2"])  # '=2 in the sheet, for a spreadsheet
    person.prefer(result=True)
    assert sorted(re.findall(r"<pre.*?>\n?(.*?)</pre>", person.page())[1:]) == ["\\u202eevil", "\\x1b[31m"]
    for _ in range(5):
        person.prefer(result=True)
    assert status_of(person.page()) == (
        "Not decided: p = .062, and it needs p < .05. Needed: at least 1 more, at most 12: "
        "this many pairs are left."
    )
    assert Ratings.load(tmp_path) == Ratings(7, 0, 1, 12, 6, "sequential")
    page = person.page()
    for clue in ("result is", "start is", "Preferred", "Worse", "7 of"):
        assert clue not in page  # whose answers are ahead isn't said
    person.prefer(result=True)
    page = person.page()
    assert "Decided" in page
    assert status_of(page) == (
        "Preferred to the start on 8 of 8 held-out prompts by blind ratings (100%, 52% to 100%), p = .035 by "
        "a test that holds at any stop; 1 tie, 11 rows left empty."
    )
    assert "<button" not in page
    before = (tmp_path / "rate.csv").read_bytes()
    assert person.send(undo=8) == person.send(number=9, better="left") == 303
    assert (tmp_path / "rate.csv").read_bytes() == before


def test_a_rating_is_undone_and_a_second_click_changes_nothing(person: Person, tmp_path: Path) -> None:
    person.prefer(result=True)
    person.prefer(result=False)
    assert person.send(number=2, better="tie") == person.send(undo=0) == 303  # of a page that is left open
    assert Ratings.load(tmp_path) == Ratings(1, 1, 1, 17, 6, "sequential")
    assert person.send(undo=2) == person.send(undo=2) == 303
    assert person.number() == 2
    assert Ratings.load(tmp_path) == Ratings(1, 0, 1, 18, 6, "sequential")
    assert person.send(undo=0) == 303  # over the tie that nobody was asked about
    assert person.number() == 0
    assert 'name="undo"' not in person.page()


def test_pairs_that_can_t_decide_say_so(tmp_path: Path) -> None:
    rating = Rating(tmp_path, make_sheet(tmp_path, 9), 6)
    needed = "Needed: at least 8 more, at most 8: this many pairs are left."
    assert status_of(rating.page("", "")) == needed
    rating.rate(0, "tie")
    assert "The remaining pairs (7) can't decide it any more" in status_of(rating.page("", ""))
    for number in range(2, 9):
        rating.rate(number, "tie")
    page = rating.page("", "")
    assert "All pairs are rated" in page
    assert "blind ratings preferred neither the result nor the start; 9 ties" in page


def test_answers_are_text_and_nothing_else_runs(person: Person) -> None:
    page = person.page()
    assert SCRIPT not in page
    assert SCRIPT in html.unescape(page)
    policy = person.headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; style-src 'unsafe-inline'; script-src 'nonce-")
    (nonce,) = re.findall(r"'nonce-([^']+)'", policy)
    assert re.findall(r"<script[^>]*>", page) == [f'<script nonce="{nonce}">']
    assert nonce not in person.page()
    assert not re.search(r"(src|href)=", page)


def test_in_a_browser_by_keys_and_on_a_phone(person: Person, browser: Browser, tmp_path: Path) -> None:
    for scheme, width in (("light", 1280), ("dark", 390)):
        browser.open(f"http://127.0.0.1:{person.port}/?token={person.token}", scheme=scheme, width=width)
        assert browser.ask("document.title") == f"{tmp_path.name}: which is better? · agro"
        assert browser.ask("document.documentElement.scrollWidth") == width
        assert browser.ask(CONTRAST)[0] >= 4.5
        boxes = browser.ask(
            "[...document.querySelectorAll('button')].map(button => button.getBoundingClientRect())"
            ".map(box => [box.x, box.height])"
        )
        assert all(height >= 44 for _, height in boxes)  # of WCAG 2.5.5
        assert len({x for x, _ in boxes}) == (1 if width == 390 else 2)
    browser.ask("document.querySelector('pre').style.height = '200vh'")
    browser.call("Input.dispatchKeyEvent", type="keyDown", key="ArrowDown")
    assert browser.ask("sent") is False  # it scrolled: a tie is said at the end
    browser.ask("document.querySelector('pre').style.height = ''")
    for key in ("ArrowLeft", "ArrowRight", "ArrowDown", "Backspace", "Backspace", "ArrowDown"):
        browser.press(key)
    assert [row["better"] for row in read_sheet(tmp_path / "rate.csv")[:4]] == ["left", "tie", "tie", ""]
    assert browser.complaints == browser.blocked == []


def test_only_whoever_has_the_url_is_answered(person: Person, tmp_path: Path) -> None:
    port, token = person.port, person.token
    before = (tmp_path / "rate.csv").read_bytes()
    assert [
        person.ask("GET", path)[0] for path in ("/", "/?token=", "/?token=%C3%A9", f"/?token={token}x")
    ] == [403] * 4
    assert person.ask("GET", f"/rate.csv?token={token}")[0] == 404
    assert person.ask("GET", f"/?token={token}", Host=f"example.org:{port}")[0] == 403
    assert person.ask("POST", "/rate?token=", "number=0&better=left")[0] == 403
    for origin in ("null", "http://example.org", f"http://127.0.0.1:{port + 1}"):
        assert person.send(origin, number=0, better="left") == 403
    for number, better in ((0, ""), (0, "best"), ("-1", "left")):
        assert person.send(number=number, better=better) == 400
    assert person.send(number=0) == person.send(undo="²") == 400
    assert person.send(number=0, better="left", more="x" * 1000) == 413
    for length, status in (("x", 400), ("9" * 5000, 400), ("9" * 15, 413)):
        assert person.ask("POST", f"/rate?token={token}", "", **{"Content-Length": length})[0] == status
    assert (tmp_path / "rate.csv").read_bytes() == before
    assert person.send(number=0, better="left") == 303


def test_a_sheet_that_is_changed_meanwhile_is_refused_with_its_reason(person: Person, tmp_path: Path) -> None:
    (tmp_path / "rate.csv").write_text("prompt,left,right,better\n")
    status, text = person.ask("GET", f"/?token={person.token}")
    assert (status, "expected the 20 rows that were written, got 0" in text) == (409, True)


def test_a_killed_server_has_kept_what_it_answered(tmp_path: Path) -> None:
    sheet, serve = make_sheet(tmp_path), [sys.executable, "-c", SERVE, tmp_path]
    with subprocess.Popen(serve, stdout=subprocess.PIPE, text=True) as process:
        port, token = process.stdout.readline().split()
        Person(int(port), token, sheet).prefer(result=True)
        process.kill()
    assert list(read_ratings(sheet)[:2]) == [1, 0]
    assert json.loads((tmp_path / "ratings.json").read_text())["test"] == "sequential"
    assert 'name="number" value="2"' in Rating(tmp_path, sheet, 6).page("", "")


def test_by_which_names_it_may_be_asked() -> None:
    """Open to a network by any address; a name that somebody else gave to it is refused there too."""
    for host, name in (("0.0.0.0", "192.168.0.7"), ("127.0.0.1", "127.0.0.1")):
        assert [is_name_of(host, x) for x in (name, "localhost", "example.org", "")] == [1, 1, 0, 0]
    assert not is_name_of("127.0.0.1", "192.168.0.7")


def test_the_address_of_an_open_server_has_its_name(tmp_path: Path) -> None:
    with RateServer(Rating(tmp_path, make_sheet(tmp_path), 6), 0, "0.0.0.0") as opened:
        assert opened.address.startswith(f"http://{socket.gethostname()}:")
