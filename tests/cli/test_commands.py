"""The command line as a user's scripts see it: files, exit codes, one JSON document on stdout."""

from __future__ import annotations

import csv
import gzip
import html
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from running import agro, done, refused, report_of
from writing import read_samples, write_rows

from agro import config
from agro.config import NewModel
from agro.errors import Refused
from agro.models.policy import Policy
from agro.models.pretrained import new_model
from agro.pages.run.rate import RateServer
from agro.pages.run.ratings import Ratings, read_key
from agro.rollout.prompts import load_prompts
from agro.store import Store
from agro.types import Sample

SMALL = """
sampler = { n = 3, max_new = 4 }
objective = { name = "agro", beta = 0.1 }
reward = { name = "exact" }
train = { steps = 2, groups = 2 }
"""
CALCULATOR = f"{Path(__file__).parents[2]}/examples/environments/calculator.py:Calculator"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    new_model(folder, NewModel(alphabet="0123456789>", hidden=16, layers=1, heads=2, context=32), 0)
    return folder


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    rows = ({"prompt": f"{i}>", "answer": str(i % 10)} for i in range(12))
    return write_rows(tmp_path / "prompts.jsonl", rows)


@pytest.mark.report
def test_sample_score_check_export_and_train(model: Path, prompts: Path, tmp_path: Path) -> None:
    store = tmp_path / "store.db"
    sample = ("sample", "--model", model, "--prompts", prompts, "--out", store, "--max-new", 4)
    done(*sample, "-n", 3)
    done(*sample, "-n", 1, "--seed", 1)
    checked = done("check", store).stdout
    assert "48 unscored" in checked
    assert "recommended: sft, neither rewards nor pairs" in checked
    asked = refused("check", store, "--objective", "agro")
    assert "objective agro needs reward: 0 of 48 rows have it" in asked
    scored = report_of("score", store, "--reward", "exact")
    assert scored["scored"] == 48
    found = report_of("check", store, "--objective", "sft")
    assert (found["samples"], found["groups"], found["with_behavior"]) == (48, 12, 48)
    assert found["trainable"] is True
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        f'policy.model = "{model}"\ndata = {{store = "{store}", replay = 1.0}}\n'
        'objective = {name = "agro", beta = 0.1}\n'
    )
    run = tmp_path / "run"
    done("train", recipe, "train.steps=2", "train.groups=4", "--out", run)
    assert (run / "report.html").stat().st_size > 10_000
    done("report", run)
    assert "there is a run in this folder" in refused("train", recipe, "train.groups=4", "--out", run)
    assert "train.steps" in refused("train", recipe, "train.steps=many")


def test_sampling_again_adds_other_responses(model: Path, prompts: Path, tmp_path: Path) -> None:
    """With one seed the numbers of responses continue, so that two calls are one call of more responses."""
    command = ("sample", "--model", model, "--prompts", prompts, "--max-new", 8)
    for n in (3, 3, 2):
        done(*command, "--out", tmp_path / "s.db", "-n", n)
    done(*command, "--out", tmp_path / "other.db", "-n", 3, "--seed", 0)
    with Store.open(tmp_path / "s.db") as store, Store.open(tmp_path / "other.db") as other:
        samples = list(store.samples())
        assert [s.replace(id=None) for s in samples[:36]] == list(other.samples())
        assert store.experience.next_number(1) == 0
    numbers = [s.meta["index"] for s in samples]
    assert sorted(numbers) == list(range(12 * (3 + 3 + 2)))
    by_prompt = [[s.response for s in samples if s.prompt == f"{i}>"] for i in range(12)]
    assert all(len(set(responses)) > 6 for responses in by_prompt)  # of 8; a short one may repeat by chance


def test_the_next_number_of_a_store_with_records_of_any_kind(tmp_path: Path) -> None:
    metas = ({"index": 7}, {"index": "99"}, {"index": 99.5}, {}, {"index": 8, "x": "\ud800"})
    with Store.open(tmp_path / "s.db") as store:
        assert store.experience.next_number(0) == 0
        store.append(Sample("a", "b", sampling={"seed": 0}, meta=meta) for meta in metas)
        store.append([Sample("a", "b", meta={"index": 50}), Sample("a", "b", sampling={"seed": 3})])
        assert [store.experience.next_number(seed) for seed in (0, 3)] == [9, 0]


def test_sample_writes_files_by_their_ending(model: Path, prompts: Path, tmp_path: Path) -> None:
    for name in ("out.jsonl", "out.jsonl.gz", "out.parquet"):
        command = ("sample", "--model", model, "--prompts", prompts, "--out", tmp_path / name)
        done(*command, "-n", 2, "--greedy")
        samples = list(read_samples(tmp_path / name))
        assert len(samples) == 24
        assert samples[0].response == samples[1].response
        assert "this file exists" in refused(*command)


def test_import_says_what_it_took_and_refused(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl.gz"
    rows = [
        '{"q": "1>", "out": ["1", "2"], "ok": [true, false]}',
        '{"q": "2>", "out": ["1"], "ok": [0.5]}',
        '{"q": "3>"',
        '{"q": "4>", "out": ["1"], "ok": ["perhaps"]}',
    ]
    log.write_bytes(gzip.compress("\n".join(rows).encode()))
    maps = ("--map", "prompt=q", "--map", "response=out", "--map", "reward=ok")
    command = ("import", log, "--store", tmp_path / "s.db", *maps)
    report = report_of(*command)
    assert (report["samples"], report["groups"], len(report["refused"])) == (3, 2, 2)
    assert [r["where"] for r in report["refused"]] == [f"{log}:3", f"{log}:4"]
    assert report_of(*command)["samples"] == 0  # the same file again
    with Store.open(tmp_path / "s.db", read_only=True) as store:
        assert [s.reward for s in store.samples()] == [1.0, 0.0, 0.5]
    new = ("import", log, "--store", tmp_path / "new.db")
    assert "did you mean response?" in refused(*new, "--map", "respons=out")
    assert not list(tmp_path.glob("new.db*"))
    assert "FIELD=COLUMN" in refused("import", log, "--store", tmp_path / "s.db", "--map", "response")


def test_import_puts_the_prompts_tokens_before_those_of_the_responses(model: Path, tmp_path: Path) -> None:
    """The log-probs stay known where the model with this tokenizer is trained."""
    encoder = Policy.load(config.PolicyConfig(model=str(model))).encoder
    ids = [*encoder.ids("23"), encoder.eos_ids[0]]
    row = {"prompt": "1>", "completion": "23", "token_ids": ids, "logprobs": [-0.5] * 3}
    log = write_rows(tmp_path / "log.jsonl", [row])
    maps = ("--map", "response=completion", "--map", "tokens=token_ids", "--map", "behavior_logp=logprobs")
    import_ = ("import", log, "--store", tmp_path / "s.db", *maps)
    assert "--tokenizer" in refused(*import_)
    done(*import_, "--tokenizer", model)
    with Store.open(tmp_path / "s.db", read_only=True) as store:
        (s,) = store.samples()
        assert store.counts().with_behavior == 1
    assert s.tokens.tolist() == encoder.prompt("1>") + ids
    assert encoder.encode(s) is s


def test_check_names_what_an_objective_lacks(tmp_path: Path) -> None:
    """And the file that was given, not the store that it made of it."""
    rows = [{"prompt": "p", "response": r, "reward": r == "a"} for r in "abc"]
    log = write_rows(tmp_path / "log.jsonl", rows)
    assert "note: Recipe log can train on this" in done("check", log).stdout
    result = agro("check", log, "--objective", "grpo", "--json")
    assert result.exit_code == 2
    assert json.loads(result.stdout)["trainable"] is False
    words = r"objective grpo needs behavior_logp: 0 of 3 rows.*sample 1.*sample 2.*sample 3.*What to do"
    assert re.search(words, result.stderr)
    assert "needs samples of staleness 0" in refused("check", log, "--objective", "agro_onpolicy")
    alone = write_rows(tmp_path / "alone.jsonl", rows[:1])
    said = refused("check", alone)
    assert f"0 of 1 groups in {alone} " in said
    assert "store.db" not in said


def test_check_measures_how_a_model_ranks_the_responses(model: Path, tmp_path: Path) -> None:
    rows = ({"prompt": "1>", "response": str(i), "reward": i % 2} for i in range(6))
    check = ("check", write_rows(tmp_path / "log.jsonl", rows))
    assert "auc" not in report_of(*check)
    alone = report_of(*check, "--model", model)
    assert (alone["auc_of"], alone["auc_groups"], alone["auc_se"]) == ("log π", 1, None)
    flipped = ({"prompt": "1>", "response": str(i), "reward": 1 - i % 2} for i in range(6))
    other = report_of("check", write_rows(tmp_path / "flipped.jsonl", flipped), "--model", model)
    assert other["auc"] == pytest.approx(1 - alone["auc"])  # of 9 pairs, so that neither is ½
    itself = report_of(*check, "--model", model, "--reference", model)
    assert (itself["auc_of"], itself["auc"]) == ("log π/π_ref", 0.5)  # log-ratios of 0 are ties
    same = report_of(*check, "--model", model, "--policy", "dtype=float32")
    assert same["recommended"][0]["command"].endswith(" --out runs/log policy.dtype=float32")
    assert "--reference and --policy need --model" in refused(*check, "--reference", model)


def test_eval_prints_accuracy_and_pass_at_k(model: Path, prompts: Path) -> None:
    given = ("--model", model, "--prompts", prompts, "--reward", "exact")
    report = report_of("eval", *given, "-n", 4, "--max-new", 4)
    assert set(report) >= {"accuracy", "pass@1", "pass@2", "pass@4", "unscored", "reward_mean"}
    assert report["accuracy"]["low"] <= report["accuracy"]["value"] <= report["accuracy"]["high"]
    assert report["pass@1"]["value"] == pytest.approx(report["accuracy"]["value"])
    assert report["pass@4"]["value"] >= report["pass@1"]["value"]


def test_bad_requests_end_with_2_and_name_the_place(model: Path, prompts: Path, tmp_path: Path) -> None:
    bad, not_json = tmp_path / "bad.jsonl", tmp_path / "nan.jsonl"
    bad.write_text('{"prompt": "1>"}\n{"promt": "2>"}\n')
    not_json.write_text('{"prompt": "1>", "answer": NaN}\n')
    recipe, wrong = tmp_path / "recipe.toml", tmp_path / "wrong.toml"
    recipe.write_text('train = { lr = 1e-3 }\npolicy = { model = "m" }\n')
    wrong.write_text("train = { lr = -1 }\n")
    kept = tmp_path / "checkpoints/step-00000004"
    kept.mkdir(parents=True)
    here, none, out = ("--prompts", prompts), tmp_path / "none", ("--out", tmp_path / "s.db")
    sample, eval_ = ("sample", "--model", model, *out), ("eval", "--model", model, "--reward", "exact")
    train, too_cold = ("train", recipe, *out), ("--temperature", "1e-40")
    gone = ("eval", "--model", kept.with_name("step-00000002"), "--reward", "exact", *here)
    mistyped = (*sample, *here, "--policy", "tempature=2")
    requests = {
        f"{bad}:2": (*eval_, "--prompts", bad),
        f"{not_json}:1": (*eval_, "--prompts", not_json),
        "no such folder": ("eval", "--model", none, "--reward", "exact", *here),
        "did you mean exact?": ("eval", "--model", model, "--reward", "exat", *here),
        "--reward is set 2 times; it takes one value": (*eval_, "--reward=math", *here),
        "--pass-at: expected a finite number, got nan": ("eval", tmp_path, "--pass-at", "nan"),
        "there is no such folder; there are step-00000004": gone,
        "none.db": ("score", tmp_path / "none.db", "--reward", "exact"),
        "config.json": ("report", tmp_path),
        f"{none}": ("sample", "--model", none, *here, *out),
        "--temperature": (*sample, *here, "--greedy", "--temperature", 0.5),
        "sampler.temperature: expected 0 (greedy)": (*sample, *here, *too_cold),
        "or at least 1e-06": (*eval_, *here, *too_cold),
        "chat template": (*sample, *here, "--policy", "chat.wrap=true"),
        "unknown key policy.tempature; did you mean policy.temperature?": mistyped,
        "none.toml": ("train", tmp_path / "none.toml"),
        f"did you mean {recipe}": ("train", tmp_path / "recpie.toml", *out),
        "agro: command line: unknown key train.step; did you mean train.steps?": (*train, "train.step=3"),
        "agro: command line: train.lr: input should be greater": (*train, "train.lr=-1"),
        f"agro: {wrong}: train.lr: input": ("train", wrong, "train.steps=3", *out),
    }
    for said, command in requests.items():
        assert said in refused(*command)
    assert not list(tmp_path.glob("s.db*"))
    assert agro("trane").exit_code == 2


def test_a_users_mistake_has_no_traceback(tmp_path: Path) -> None:
    out = subprocess.run(
        [sys.executable, "-m", "agro", "train", "none.toml"], capture_output=True, text=True, cwd=tmp_path
    )
    assert out.returncode == 2
    assert out.stdout == ""
    assert out.stderr == (
        "agro: none.toml: can't be read: No such file or directory; "
        "expected a TOML recipe or a run's config.json, or a recipe's name (agro recipes)\n"
    )


@pytest.mark.parametrize("name", ["s" * 300, "log.jsonl/s.db"])
def test_a_name_that_no_file_can_have(tmp_path: Path, name: str) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text('{"prompt": "a", "response": "b"}\n')
    path = tmp_path / name
    for arguments in (
        ("import", log, "--store", path),
        ("import", path, "--store", tmp_path / "s.db"),
        ("check", path),
        ("store", "recover", path, tmp_path / "new.db"),
        ("score", path, "--reward", "exact"),
    ):
        assert str(path) in refused(*arguments)
    done("import", log, "--store", tmp_path / "s.db")
    assert str(path.parent) in refused("store", "recover", tmp_path / "s.db", path)


def test_half_of_a_surrogate_pair_is_printed_escaped(tmp_path: Path) -> None:
    lines = [json.dumps({"prompt": prompt, "prompt_id": "\ud83d", "response": "b"}) for prompt in "ab"]
    (tmp_path / "log.jsonl").write_text("\n".join(lines))
    agro_ = [sys.executable, "-m", "agro", "import", "log.jsonl", "--store"]
    for store, more in (("s.db", []), ("t.db", ["--json"])):
        out = subprocess.run([*agro_, store, *more], capture_output=True, text=True, cwd=tmp_path)
        assert (out.returncode, out.stderr) == (0, "")
        assert "expected \\ud83d to name one prompt" in out.stdout


def test_score_only_what_is_missing_and_what_fails_erases_none(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    answer = {"answer": "a"}
    with Store.open(path) as store:
        store.append([Sample("p", "a", 0.25, meta=answer), Sample("p", "a", meta=answer), Sample("p", "b")])
    report = report_of("score", path, "--reward", "exact", "--missing")
    assert (report["scored"], report["failed"]) == (1, 1)
    (tmp_path / "bad.py").write_text("def f(completions, **_):\n    raise RuntimeError('no judge today')\n")
    assert "no judge today" in refused("score", path, "--reward", f"{tmp_path}/bad.py:f")
    with Store.open(path, read_only=True) as store:
        assert [s.reward for s in store.samples()] == [0.25, 1.0, None]


def test_prompt_ids_and_numbers_of_prompt_files(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "x", "prompt_id": null}\n{"prompt": "y", "id": 7}\n')
    first, second = load_prompts(path)
    assert (len(first.id), second.id) == (16, "7")
    wrong = dict.fromkeys(('"id": true', '"id": 7.0', '"id": [7]'), "prompt_id: expected text or an integer")
    for field, said in {**wrong, '"answer": 1e999': ""}.items():
        path.write_text(f'{{"prompt": "x", {field}}}\n')
        with pytest.raises(Refused, match=rf"p\.jsonl:1: {said}"):
            load_prompts(path)


def test_a_dry_run_says_what_would_happen_and_writes_nothing(model, prompts, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(SMALL)
    settings = (f"policy.model={model}", f"data.prompts={prompts}", "train.steps=5")
    given = [recipe, *settings, "--out", tmp_path / "run", "--dry-run"]
    found = report_of("train", *given)
    assert found["phases"][0]["responses_sampled"] == 5 * 2 * 3
    assert "train: agro, 5 steps" in done("train", *given).stdout
    assert not (tmp_path / "run").exists()


def test_a_run_as_json_says_whether_the_model_got_better(model: Path, prompts: Path, tmp_path: Path) -> None:
    recipe, run = tmp_path / "recipe.toml", tmp_path / "run"
    recipe.write_text(SMALL)
    rows = ({"prompt": f"7{i}>", "answer": "1"} for i in range(12))
    held_out = write_rows(tmp_path / "held_out.jsonl", rows)
    files = [f"data.prompts={prompts}", f"data.eval_prompts={held_out}"]
    trained = report_of("train", recipe, f"policy.model={model}", *files, "--out", run)
    assert (trained["run"], trained["model"]) == (str(run), str(run / "model"))
    row = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    verdict = trained["verdict"]
    measured = {name: row[f"eval_gain_{name}"] for name in ("low", "high", "p", "n", "detectable")}
    measured |= {"step": 2, "gain": row["eval_gain"], "kl": row["eval_kl_ref"]}
    assert {name: verdict[name] for name in measured} == measured
    assert (verdict["n"], verdict["answer"]) == (12, "not shown")
    assert report_of("report", run) == trained
    assert "--watch" in refused("report", run, "--json", "--watch")
    found = report_of("eval", run, "--against", "start", "-n", 1)
    again = found["verdict"]  # the same prompts, other random numbers than the run's
    assert (again["n"], again["answer"], again["step"]) == (12, "not shown", None)
    more = ("--prompts", held_out, "--reward", "exact", "--against", "start")
    assert "--against start: expected the folder of a run" in refused("eval", "--model", model, *more)
    assert "use --model for a model" in refused("eval", model, *more)
    assert "expected start, the run's first model; agro compare A B" in refused(
        "eval", run, "--against", model
    )


def test_a_log_without_a_reward_is_judged_by_blind_ratings(tmp_path: Path, monkeypatch) -> None:
    rows = ({"prompt": f"7{i}>", "answer": "1"} for i in range(9))
    held_out = write_rows(tmp_path / "held_out.jsonl", rows)
    with Store.open(tmp_path / "log.db") as store:
        store.append(Sample(f"{i}>", str(k), float(k % 2), role="log") for i in range(8) for k in range(4))
    recipe, run, sheet = tmp_path / "recipe.toml", tmp_path / "run", tmp_path / "sheets" / "out.csv"
    recipe.write_text(
        f"""
        policy = {{ new = {{ alphabet = "0123456789>", hidden = 16, layers = 1, heads = 2, context = 16 }} }}
        data = {{ store = "{tmp_path / "log.db"}", replay = 1.0, group_size = 4 }}
        sampler = {{ max_new = 4 }}
        objective = {{ name = "agro", beta = 0.1 }}
        train = {{ steps = 2, groups = 4, lr = 0.05 }}
        """
    )
    ended = done("train", recipe, "--json", "--out", run)
    trained = json.loads(ended.stdout)["verdict"]
    assert (trained["answer"], trained["ratings"]) == ("not measured", None)
    assert "agro rate RUN --prompts FILE" in trained["sentence"]
    last = ended.stderr.splitlines()[-1]
    assert last == f"did it get better? people can judge that, blind: agro rate {run} --prompts FILE"

    given = ("eval", run, "--prompts", held_out, "--against", "start", "--blind", sheet)
    assert "leave out --model, --reward, -n" in refused(*given, "--model", run, "--reward", "exact", "-n", 8)
    assert "expected --against start" in refused("eval", run, "--prompts", held_out, "--blind", sheet)
    assert not sheet.parent.exists()
    written = report_of(*given)
    assert (written["sheet"], written["prompts"], written["failed"]) == (str(sheet), 9, 0)
    key = json.loads(Path(written["key"]).read_text())
    with sheet.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    responses = tmp_path / "responses.jsonl"
    done("eval", run, "--prompts", held_out, "--reward", "exact", "-n", 1, "--out", responses)
    own = [json.loads(line)["responses"][0] for line in responses.read_text().splitlines()]
    assert [row[side["result"]] for row, side in zip(rows, key["rows"], strict=True)] == own
    assert written["same"] == sum(row["left"] == row["right"] for row in rows) < 9
    assert "none of its 9 rows is rated" in refused("eval", run, "--ratings", sheet)
    done(*given)  # nothing is rated, so nothing is lost

    for row, side in list(zip(rows, key["rows"], strict=True))[:7]:
        row["better"] = side["result"]
    with sheet.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    assert "7 rows of it are rated" in refused(*given)
    sentence = (
        "Preferred to the start on 7 of 7 held-out prompts by blind ratings (100%, 59% to 100%), p = .016"
    )
    assert "expected the folder of the run" in refused("eval", "--ratings", sheet)
    assert done("eval", run, "--against", "start", "--ratings", sheet).stdout.startswith(sentence)
    found = report_of("eval", run, "--ratings", sheet)["verdict"]
    assert (found["answer"], found["gain"]) == ("better", None)
    assert (found["ratings"]["wins"], found["ratings"]["unrated"], found["ratings"]["p"]) == (7, 2, 2 / 2**7)
    assert sentence in (run / "model" / "README.md").read_text()  # the card is written again
    assert report_of("report", run)["verdict"] == found
    done("report", run)
    assert sentence in html.unescape((run / "report.html").read_text())

    Ratings(7, 0, 0, 2, step=1).save(run)  # as if the run went on afterwards
    found = report_of("report", run)["verdict"]
    assert found["sentence"].startswith("Preferred to the start at step 1 on 7 of 7")

    assert "expected it, or the folder of a run with held-out prompts" in refused("rate", run)
    clicks: list[str] = []

    def click(server: RateServer, text: str) -> None:
        """As a person does who prefers the result wherever it differs."""
        print(text)
        clicks.append(server.address)
        for number, row in enumerate(read_key(server.rating.sheet)["rows"]):
            server.rating.rate(number, row["result"])

    monkeypatch.setattr(RateServer, "serve_until_interrupted", click)
    monkeypatch.setattr("agro.cli.eval_command.PAIRS", 8)
    rated = done("rate", run, "--prompts", held_out)
    assert "to 8 of 9 prompts" in rated.stderr
    assert re.search(rf"^serving {clicks[0]}\?token=\S{{22}}$", rated.stdout, re.MULTILINE)
    kept = Ratings.load(run)
    assert kept is not None
    assert (kept.wins + kept.ties, kept.losses, kept.unrated, kept.test) == (8, 0, 0, "sequential")
    verdict = report_of("report", run)["verdict"]
    assert (verdict["ratings"]["test"], verdict["ratings"]["p"]) == ("sequential", kept.p)
    assert verdict["sentence"] in rated.stdout
    assert report_of("eval", run, "--ratings", run / "rate.csv")["verdict"] == verdict
    done("rate", run)  # goes on with its sheet, without sampling
    assert "with answers to its own prompts" in refused("rate", run, "--prompts", held_out)
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 3, "phase": "train"}) + "\n")
    assert "expected answers of step 3 that agro rate sampled, got step 2" in refused("rate", run)

    assert "leave out --seed" in refused("eval", run, "--ratings", sheet, "--seed", 0)
    assert "--against other: expected start" in refused("eval", run, "--against", "other", "--ratings", sheet)
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(config | {"run": None}))
    for change in ({"run": None}, {"against": "other"}, {"run": "another"}):
        Path(written["key"]).write_text(json.dumps(key | change))
        assert f"not of {run} against its start" in refused("eval", run, "--ratings", sheet)
        (run / "config.json").write_text(json.dumps(config))


def test_episodes_are_sampled_scored_and_measured(tmp_path: Path) -> None:
    """A model of random weights over a calculator's alphabet: the test is that each command plays turns."""
    new = NewModel(alphabet="0123456789+*[]= ", hidden=16, layers=1, heads=2, context=64)
    new_model(tmp_path / "m", new, 0)
    rows = ({"prompt": f"{i}+1= ", "answer": str(i + 1)} for i in range(3))
    asked = write_rows(tmp_path / "asked.jsonl", rows)
    limits = ("-n", 2, "--max-new", 8)
    given = ["--model", tmp_path / "m", "--prompts", asked, "--environment", CALCULATOR, *limits]
    done("sample", *given, "--out", tmp_path / "s.db", "--max-turns", 3)
    with Store.open(tmp_path / "s.db", read_only=True) as store:
        samples = list(store.samples())
    assert len(samples) == 6
    assert all(1 <= s.meta["turns"] <= 3 for s in samples)
    done("score", tmp_path / "s.db", "--reward", "exact")
    with Store.open(tmp_path / "s.db", read_only=True) as store:
        assert all(s.reward is not None for s in store.samples())
    assert report_of("eval", *given, "--reward", "exact")["prompts"] == 3


def test_recover_copies_what_is_whole(tmp_path: Path) -> None:
    with Store.open(tmp_path / "a.db") as store:
        store.append([Sample("p", f"response {i}", reward=float(i)) for i in range(5)])
    found = report_of("store", "recover", tmp_path / "a.db", tmp_path / "b.db")
    assert found["samples"] == 5
    with Store.open(tmp_path / "b.db", read_only=True) as store:
        assert [s.reward for s in store.samples()] == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert "no such store" in refused("store", "recover", tmp_path / "none.db", tmp_path / "c.db")
    said = refused("store", "copy", tmp_path / "a.db", tmp_path / "d.db", "--newest")
    assert "agro store copy takes stores alone: leave out --newest" in said


def test_a_checkpoint_evaluates_like_the_model_that_was_saved_with_it(prompts: Path, tmp_path: Path) -> None:
    """The last checkpoint has the weights of RUN/model; an earlier one has others."""
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        f"""
        policy = {{ new = {{ alphabet = "0123456789>", hidden = 16, layers = 1, heads = 2, context = 8 }} }}
        data = {{ prompts = "{prompts}" }}
        sampler = {{ n = 4, max_new = 2 }}
        objective = {{ beta = 0.1 }}
        train = {{ steps = 4, groups = 4, lr = 0.1, checkpoint_every = 2, keep = 3 }}
        """
    )
    run = tmp_path / "run"
    done("train", recipe, "--out", run)

    def evaluated(*model: object) -> list:
        file = tmp_path / "found.jsonl"
        done("eval", run, *model, "--prompts", prompts, "-n", 4, "--out", file)
        return [json.loads(line)["responses"] for line in file.read_text().splitlines()]

    earlier = run / "checkpoints/step-00000002"
    last = evaluated("--model", run / "checkpoints/step-00000004")
    assert last == evaluated()
    assert last != evaluated("--model", earlier)
    done("sample", "--model", earlier, "--prompts", prompts, "--out", tmp_path / "s.db")


def test_eval_of_a_run_reads_its_files_from_where_it_was_started(tmp_path: Path, monkeypatch) -> None:
    begun, other = tmp_path / "begun", tmp_path / "other"
    for folder, value, count in ((begun, 0.25, 2), (other, 9.0, 3)):
        folder.mkdir()
        scored = f"return [{value}] * len(completions)"
        (folder / "scoring.py").write_text(f"def fixed(completions, **_): {scored}\n")
        for name, end in (("prompts.jsonl", ">"), ("held.jsonl", ">>")):
            write_rows(folder / name, ({"prompt": f"{i}{end}"} for i in range(count)))
    (begun / "recipe.toml").write_text(
        """
        policy = { new = { alphabet = "0123456789>", hidden = 16, layers = 1, heads = 2, context = 64 } }
        data = { prompts = "prompts.jsonl", eval_prompts = "held.jsonl" }
        reward = { name = "scoring:fixed" }
        sampler = { n = 2, max_new = 2 }
        objective = { beta = 0.1 }
        train = { steps = 1, groups = 2 }
        """
    )
    monkeypatch.chdir(begun)
    done("train", "recipe.toml", "--out", "runs/a")
    onto_a_file = ("train", "recipe.toml", "--out", "held.jsonl")
    assert "held.jsonl: File exists; use another path" in refused(*onto_a_file)
    monkeypatch.chdir(other)
    out = Path("new/folder/found.jsonl")
    report = report_of("eval", "../begun/runs/a", "-n", 2, "--out", out)
    assert (report["prompts"], report["reward_mean"]["value"]) == (2, 0.25)
    assert len(out.read_text().splitlines()) == 2
    told = done("eval", "../begun/runs/a", "-n", 2).stdout
    assert "before and after, at the run's end: Not shown better" in told
    own = ("--prompts", "held.jsonl", "--reward", "scoring.py:fixed")
    report = report_of("eval", "../begun/runs/a", *own, "-n", 2)
    assert (report["prompts"], report["reward_mean"]["value"]) == (3, 9.0)

    done("eval", "--model", "../begun/runs/a/model", *own, "-n", 2, "--out", out)
    lengths = [len(text) for line in out.read_text().splitlines() for text in json.loads(line)["responses"]]
    assert max(lengths) <= 2  # as in the run: sampler.max_new

    (other / "broken.py").write_text("def broken(completions, **_): raise ValueError('no')\n")
    broken = ("eval", "../begun/runs/a", "--reward", "broken.py:broken", "-n", 2)
    assert "no response could be scored" in refused(*broken)
