"""The owner of a store over HTTP: who is refused, lost answers, calls that take long, writes together."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import httpx
import msgpack
import pytest
from making import group, sample
from serving import TOKEN, served

from agro.errors import Refused
from agro.logs.importing import import_files
from agro.store import At, DrawRule, Origin, Store
from agro.store.ledger import Ledger
from agro.store.sample_rows import SampleRow
from agro.store.samples import Experience
from agro.store.serving import app, http
from agro.store.serving.owner import Call, Owner
from agro.store.serving.wire import LENGTH, SAMPLE, TUPLE, pack, unpack
from agro.store.sqlite import SqliteDatabase

AUTHORIZED = {"authorization": f"Bearer {TOKEN}"}


@pytest.fixture(autouse=True)
def _token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGRO_TOKEN", TOKEN)


@pytest.fixture
def url(path: Path) -> Iterator[str]:
    with served(path) as url:
        yield url


def post(url: str, body: bytes, **headers: bytes) -> tuple[int, str]:
    """The status, and the text of an error."""
    response = httpx.post(f"{url}/call", content=body, headers={**AUTHORIZED, **headers})
    return response.status_code, unpack(response.content, "client")[1]


@pytest.mark.parametrize("given", ["", "Bearer another", f"Basic {TOKEN}", TOKEN, f"Bearer {TOKEN}x", "é"])
def test_another_token_is_refused(url: str, path: Path, given: str) -> None:
    body = pack(["me", 1, "requests.claim", ["r", "c"], {"maximum": 1, "ahead": 1}])
    status, text = post(url, body, authorization=given.encode())
    assert status == 401
    assert "AGRO_TOKEN" in text
    assert httpx.get(f"{url}/metrics", headers={"authorization": given.encode()}).status_code == 401
    with Store.open(path) as store:
        assert store.requests.backlog("r", 0) == 0


def test_a_store_without_a_token_or_with_another_one_says_what_to_do(url: str, monkeypatch) -> None:
    monkeypatch.setenv("AGRO_TOKEN", "another")
    with pytest.raises(Refused, match=r"the token isn't the owner's.*AGRO_TOKEN"):
        Store.open(url)
    monkeypatch.delenv("AGRO_TOKEN")
    with pytest.raises(Refused, match=r"asks for a token.*AGRO_TOKEN"):
        Store.open(url)


DEEP = b"\x01"
for _ in range(40):
    DEEP = msgpack.packb(msgpack.ExtType(TUPLE, DEEP))


ROW = msgpack.ExtType(SAMPLE, b"")
A_ROW = msgpack.packb(SampleRow.of(sample()).values)


def framed(call: list[object], rows: bytes = b"") -> bytes:
    """A message as it travels: its length, a call, and rows of two bytes each."""
    packed = msgpack.packb(call)
    return len(packed).to_bytes(LENGTH, "little") + packed + rows


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"", "can't be read"),
        (b"\xc1", "can't be read"),
        (b"\x80\x04\x95\x00", "expected a call|can't be read"),  # as a pickle begins
        (pack({}), "expected a call"),
        (pack(["me", 1, "counts", []]), "expected a call"),
        (pack(["me", "1", "ledger.knows", ["r"], {}]), "expected a call"),
        (pack(["me", 1, "ledger.knows", [], {}]), "missing a required argument"),
        (pack(["me", 1, "ledger.knows", ["r"], {"more": 1}]), "unexpected keyword argument 'more'"),
        (pack(["me", 1, "requests.claim", [7, "c"], {"maximum": 1, "ahead": 1}]), "AttributeError"),
        (pack(["me", 1, "os.system", ["true"], {}]), "expected a method of the owner"),
        (pack(["me", 1, "tables.database", [], {}]), "expected a method of the owner"),
        (pack(["me", 1, "draws.__init__", [], {}]), "expected a method of the owner"),
        (pack(["me", 1, "imports.forget", [[1]], {}]), "expected a method of the owner"),
        (framed(["me", 1, "ledger.knows", [msgpack.ExtType(77, b"")], {}]), "unknown type 77"),
        (framed(["me", 1, "ledger.knows", [ROW], {}], msgpack.packb([1])), "a sample's row"),
        (framed(["me", 1, "ledger.knows", [ROW, ROW], {}], msgpack.packb([1])), "a sample's row"),
        (framed(["me", 1, "ledger.knows", [ROW], {}]), "can't be read"),  # without the row that it names
        (pack(["me", 1, "ledger.knows", ["r"], {}]) + b"\x01", "can't be read"),
        (pack(["me", 1, "ledger.knows", ["r"], {}]) + A_ROW, "more rows than it names"),
        (len(DEEP).to_bytes(LENGTH, "little") + DEEP, "nested"),
    ],
)
def test_what_is_no_call_is_refused(url: str, body: bytes, text: str) -> None:
    status, got = post(url, body)
    assert status == 400
    assert httpx.get(f"{url}/healthz").json() == {"status": "ok"}  # and the owner goes on
    assert re.search(text, got), got


def test_rows_that_are_not_of_a_sample_are_refused(url: str) -> None:
    packed = pack(["me", 1, "experience.append", [[sample("p", "secret")]], {}])
    changed = packed.replace(b"secret", b"Secret")
    assert post(url, changed) == (400, "a sample's row isn't as its sender wrote it")
    status, text = post(url, packed.replace(b"\xc0", b"\x01", 1))
    assert status == 400
    assert "a sample's row" in text


def test_a_body_that_is_too_large_is_refused(path: Path) -> None:
    with served(path, body_bytes=20_000) as url, Store.open(url) as store:
        store.append(group("short", [1.0]))
        with pytest.raises(Refused, match=r"at most 20000 bytes.*fewer samples"):
            store.append([sample("long", "x" * 20_000)])
        assert [s.prompt for s in store.samples()] == ["short"]
        chunks = (b"x" * 1000 for _ in range(100))  # without a length
        assert httpx.post(f"{url}/call", content=chunks, headers=AUTHORIZED).status_code == 413


def test_another_server_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_error(404, "no such page")

        def log_message(self, *arguments: object) -> None:
            pass

    with _running(Handler) as url, pytest.raises(Refused, match=r"expected the owner of a store.*404"):
        Store.open(url)


def test_an_owner_that_is_away_is_waited_for(path: Path) -> None:
    with served(path) as url:
        store = Store.open(url, timeout=0.3)
        store.append(group("a", [1.0]))
    began = time.monotonic()
    with closing(store), pytest.raises(Refused, match=r"hasn't answered for 0\.3 s.*agro store serve"):
        store.counts()
    assert 0.3 <= time.monotonic() - began < 10


def test_metrics_count_what_was_done(url: str) -> None:
    with Store.open(url) as store:
        store.append(group("a", [1.0]))
        with pytest.raises(Refused):
            store.experience.check_ids([7])
    text = httpx.get(f"{url}/metrics", headers=AUTHORIZED).text
    for line in (
        'agro_store_calls_total{method="experience.append"} 1',
        "agro_store_refused_total 1",
        "agro_store_repeated_total 0",
        "agro_store_transactions_total 1",
        "# TYPE process_cpu_seconds_total counter",
    ):
        assert line in text.splitlines()


@contextmanager
def _running(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """The URL of a server."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


class LosingProxy(BaseHTTPRequestHandler):
    """Passes calls on, and closes the connection in place of every 7th answer."""

    target: ClassVar[str]
    passed: ClassVar[int]
    lost: ClassVar[int]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        answer = httpx.post(self.target + self.path, content=body, headers=AUTHORIZED)
        LosingProxy.passed += 1
        if self.passed % 7 == 0:
            LosingProxy.lost += 1
            self.close_connection = True
            return
        self.send_response(answer.status_code)
        self.send_header("content-length", str(len(answer.content)))
        self.end_headers()
        self.wfile.write(answer.content)

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def lossy(url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    LosingProxy.target, LosingProxy.passed, LosingProxy.lost = url, 0, 0
    monkeypatch.setattr(http, "RETRY_SECONDS", 0.001)
    with _running(LosingProxy) as proxy:
        yield proxy


def collect(url: str, name: str, claims: int) -> None:
    """A collector: claims prompts, stores and scores two responses to each."""
    with Store.open(url) as store:
        for _ in range(claims):
            numbers = store.requests.claim("r", name, maximum=2, ahead=99)
            origins = [Origin("run:r", number, part) for number in numbers for part in "01"]
            samples = [sample(f"prompt {o.record}", o.part, None) for o in origins]
            ids = store.append(samples, run="r", origins=origins)
            store.append([sample("noted", name)])  # without an origin: nothing but its call tells it apart
            store.set_rewards(((i, 1.0, {}) for i in ids), once=True)
            store.requests.finish("r", numbers)


def test_each_response_is_made_and_drawn_once_though_answers_are_lost(lossy: str, path: Path) -> None:
    """A prototype that kept no answers never sampled 40 of 160 prompts, and doubled 144 of 624 draws."""
    claims, drawn = 5, list[list[int]]()
    with ThreadPoolExecutor(2) as collectors, Store.open(lossy) as store:
        for name in "ab":
            collectors.submit(collect, lossy, name, claims)
        while len(drawn) < claims * 2:
            ready = store.requests.ready("r", 2)
            if len(ready) < 2:
                time.sleep(0.01)
                continue
            step = len(drawn) + 1
            store.requests.take("r", step, ready)
            ids = store.experience.find_in_ledger("run:r", ready)
            drawn.append([s.id for s in store.draw(None, At("r", step, 0, 0), made=ids).samples])
            store.ledger.commit("r", step, "digest")
    assert LosingProxy.lost > 10
    with Store.open(path, read_only=True) as store:
        made = [(s.prompt, s.response) for s in store.samples() if s.prompt != "noted"]
        assert sorted(made) == sorted({(f"prompt {i}", part) for i in range(claims * 4) for part in "01"})
        assert [len(ids) for ids in drawn] == [4] * claims * 2
        recorded = [draw.sample for draw in store.draws.drawn("r")]
        assert recorded == [i for ids in drawn for i in ids]
        assert len(set(recorded)) == len(recorded) == claims * 8
        noted = [s.response for s in store.samples() if s.prompt == "noted"]
        assert sorted(noted) == ["a"] * claims + ["b"] * claims
        [(commits,)] = store._database.run("SELECT count(*) FROM commits")
        assert commits == claims * 2
        assert not store.tables.damage()


def call(number: int, method: str, *args: object, client: str = "me", **kwargs: object) -> Call:
    return Call.read(pack([client, number, method, list(args), kwargs]))


def test_the_answer_of_a_write_outlives_the_owner(path: Path) -> None:
    append = call(5, "experience.append", [sample("p", "r")])
    with closing(Owner(path)) as owner:
        first = owner.submit(append).result()
    with closing(Owner(path)) as owner:
        assert owner.submit(append).result() == first
        assert owner.counts.repeated == 1
        other = owner.submit(append._replace(client="you")).result()
        assert [unpack(answer.body, "client") for answer in (first, other)] == [[1], [2]]
        late = owner.submit(append._replace(number=4)).result()
        assert late.status == 400
        assert "call 4 arrived after" in unpack(late.body, "client")[1]
    with Store.open(path) as store:
        assert store.counts().samples == 2


def test_answers_of_long_ago_are_not_kept(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    append = call(5, "experience.append", [sample("p", "r")])
    with closing(Owner(path)) as owner:
        owner.submit(append).result()
    monkeypatch.setattr("agro.store.serving.owner.KEPT_SECONDS", -1.0)
    with closing(Owner(path)):
        pass
    with SqliteDatabase(path, read_only=True, create=False, timeout=1.0) as database:
        assert database.run("SELECT count(*) FROM answers") == [(0,)]


def test_calls_that_wait_are_written_together_and_refused_alone(path: Path, monkeypatch) -> None:
    """Of 8 writes that arrive while a read is at work one is refused: the others are one transaction."""
    begin, go_on = threading.Event(), threading.Event()

    def slow(self: Ledger, run: str) -> bool:
        begin.set()
        go_on.wait(30)
        return True

    monkeypatch.setattr(Ledger, "knows", slow)
    with closing(Owner(path)) as owner:
        owner.submit(call(1, "ledger.knows", "r"))
        begin.wait(30)
        futures = [
            owner.submit(call(1, "experience.append", [sample(f"{i}")], client=f"client {i}"))
            for i in range(7)
        ]
        futures.append(owner.submit(call(1, "experience.set_rewards", [[9, 1.0, {}]], client="wrong")))
        go_on.set()
        assert [future.result().status for future in futures] == [200] * 7 + [400]
        assert owner.counts.transactions == 1
        assert "no sample has the id 9" in unpack(futures[-1].result().body, "client")[1]
    with Store.open(path) as store:
        assert [s.prompt for s in store.samples()] == list("0123456")


def test_a_call_that_fails_is_undone_alone(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Experience.append

    def failing(self: Experience, samples: list[object], **options: object) -> list[int]:
        ids = plain(self, samples, **options)  # type: ignore[arg-type]
        if len(ids) == 2:
            raise RuntimeError("of agro's own")
        return ids

    monkeypatch.setattr(Experience, "append", failing)
    with closing(Owner(path)) as owner:
        answer = owner.submit(call(1, "experience.append", group("two", [1.0, 2.0]))).result()
        assert unpack(answer.body, "client")[1] == "experience.append: RuntimeError: of agro's own"
        assert owner.submit(call(1, "experience.append", group("one", [1.0]))).result().status == 200
    with Store.open(path) as store:
        assert [s.prompt for s in store.samples()] == ["one"]


def test_a_call_that_takes_long_is_waited_for_and_made_once(url: str, monkeypatch) -> None:
    """The owner says every 0.05 s that the call is at work, longer than the client waits without a word."""
    calls = []

    def slow(self: Ledger, run: str) -> bool:
        calls.append(run)
        time.sleep(0.6)
        return True

    monkeypatch.setattr(Ledger, "knows", slow)
    monkeypatch.setattr(app, "REPLY_SECONDS", 0.05)
    with Store.open(url, timeout=0.3) as store:
        assert store.ledger.knows("r")
        assert store.counts().samples == 0
    assert calls == ["r"]


def test_what_is_known_of_imported_files_travels(path: Path, tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text('{"prompt": "1+1=", "response": "2", "reward": 1.0}\n')
    with Store.open(path) as store:
        import_files(store, [log])
        provenance = store.imports.provenance()
    assert [(origin.file, origin.samples) for origin in provenance] == [("log.jsonl", 1)]
    with served(path) as url, Store.open(url) as store:
        assert store.imports.provenance() == provenance


def test_a_read_only_store_writes_nothing(url: str) -> None:
    with Store.open(url, read_only=True) as store:
        with pytest.raises(Refused, match="opened read-only"):
            store.append(group("p", [1.0]))
        with pytest.raises(Refused, match="opened read-only"):
            store.draw(DrawRule(1, fewer=True), At("r", 1, 0, 0))
        assert store.counts().samples == 0
