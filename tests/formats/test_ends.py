"""How a response ended: every program's words for it, wherever its records have them."""

import json
from pathlib import Path

import pytest
from example import changed, otlp_attributes
from writers import INSPECT

from agro.logs.importing import import_files
from agro.pages.store.check_survey import survey
from agro.store import Store
from agro.types import Sample, end_in, thought_in

REPORTS = Path(__file__).parents[2] / "../shared/data/reports"
ASK = {"role": "user", "content": "Count to nine"}
SAY = {"role": "assistant", "content": "one two"}

# Of OpenAI, Anthropic, Gemini, Mistral, Cohere, Bedrock, SGLang, TGI, llama.cpp, LM Studio and others.
CUT = (
    *("length", "LENGTH", "max_tokens", "MAX_TOKENS", "FinishReason.MAX_TOKENS", "FINISH_REASON_MAX_TOKENS"),
    *("model_length", "max_output_tokens", "maxTokens", "MaxPredictedTokensReached", "content_filter"),
    *("content-filter", "SAFETY", "guardrail_intervened", "model_context_window_exceeded", "limit", "abort"),
    *("incomplete", "ERROR_LIMIT", "refusal", "pause_turn", "truncated", {"type": "length", "length": 9}),
)
FINISHED = (
    *("stop", "STOP", "FinishReason.STOP", "end_turn", "endTurn", "stop_sequence", "COMPLETE", "eos_token"),
    *("tool_calls", "tool_use", "function_call", "completed", "eosFound", {"type": "stop", "matched": 2}),
)
UNKNOWN = ("unknown", "null", "", "OTHER", "FINISH_REASON_UNSPECIFIED")
STRANGE = ("wibble", 2, ["stop", "length"], {"why": 1.5, "type": "wibble"})
END_OF = [
    *[(word, "cut") for word in CUT],
    *[(word, "finished") for word in FINISHED],
    *[(word, "unknown") for word in UNKNOWN],
    *[(word, None) for word in STRANGE],
]


@pytest.mark.parametrize(("said", "end"), END_OF)
def test_what_a_word_says(said, end):
    assert end_in(said) == end


def langchain(**message):
    kwargs = {"content": "one two", "type": "ai", "tool_calls": [], **message}
    said = {"lc": 1, "type": "constructor", "id": ["x", "AIMessage"], "kwargs": kwargs}
    human = {"lc": 1, "type": "constructor", "id": ["x", "HumanMessage"], "kwargs": ASK | {"type": "human"}}
    return {
        "id": "r",
        "run_type": "llm",
        "inputs": {"messages": [[human]]},
        "outputs": {"generations": [[{"text": "one two", "message": said}]]},
        "extra": {},
    }


def langfuse(output):
    return {"id": "o", "traceId": "t", "type": "GENERATION", "input": [ASK], "output": output}


def span(attributes):
    values = {"traceId": "a", "spanId": "b", "name": "chat", "startTimeUnixNano": "1"}
    values["attributes"] = otlp_attributes(attributes)
    return {"resourceSpans": [{"scopeSpans": [{"spans": [values]}]}]}


def own(**columns):
    return {"prompt": "Count to nine", "response": "one two", **columns}


CHOICE = {"index": 0, "message": SAY, "finish_reason": "SAID"}
COMPLETION = {"object": "chat.completion", "choices": [CHOICE]}
PARTS = {"parts": [{"type": "text", "content": "one two"}], "role": "assistant", "finish_reason": "SAID"}
ASKED_PARTS = {"role": "user", "parts": [{"type": "text", "content": "Count to nine"}]}
INSPECTED = {
    "id": 0,
    "epoch": 1,
    "input": "Count to nine",
    "target": "9",
    "messages": [ASK | {"source": "input"}, SAY | {"source": "generate"}],
    "output": {"model": "m", "choices": [{"message": SAY | {"source": "generate"}, "stop_reason": "SAID"}]},
    "scores": {},
    "metadata": {},
}
READERS = {  # a record whose end is said, where SAID stands, in the words of a program
    "column finish_reason": own(finish_reason="SAID"),
    "column stop_reason": own(stop_reason="SAID"),
    "column done_reason": own(done_reason="SAID"),
    "column stopReason": own(stopReason="SAID"),
    "meta.finish": own(meta={"finish": "SAID"}),
    "meta.finish_reason": own(meta={"finish_reason": "SAID"}),
    "conversation": {"messages": [ASK, SAY], "finish_reason": "SAID"},
    "completion": {"request": {"messages": [ASK]}, "response": COMPLETION},
    "openai batch": {
        "custom_id": "a",
        "response": {"status_code": 200, "body": COMPLETION},
        "error": None,
    },
    "langsmith, metadata": langchain(response_metadata={"finish_reason": "SAID"}),
    "langsmith, metadata's stop_reason": langchain(response_metadata={"stop_reason": "SAID"}),
    "langsmith, metadata's done_reason": langchain(response_metadata={"done_reason": "SAID"}),
    "langsmith, metadata's stopReason": langchain(response_metadata={"stopReason": "SAID"}),
    "langsmith, generation_info": changed(
        langchain(), "outputs.generations.0.0.generation_info", {"finish_reason": "SAID"}
    ),
    "langfuse, Anthropic": langfuse(
        {"role": "assistant", "content": [{"type": "text", "text": "one two"}], "stop_reason": "SAID"}
    ),
    "langfuse, choices": langfuse({"choices": [CHOICE]}),
    "langfuse, text": langfuse({"choices": [{"text": "one two", "finish_reason": "SAID"}]}),
    "langfuse, Ollama": langfuse({"message": SAY, "done": True, "done_reason": "SAID"}),
    "otlp": span(
        {
            "gen_ai.operation.name": "chat",
            "gen_ai.input.messages": json.dumps([ASKED_PARTS]),
            "gen_ai.output.messages": json.dumps([PARTS]),
        }
    ),
    "old otlp": span(
        {
            "gen_ai.prompt.0.role": "user",
            "gen_ai.prompt.0.content": "Count to nine",
            "gen_ai.completion.0.content": "one two",
            "gen_ai.completion.0.finish_reason": "SAID",
        }
    ),
    "inspect": {**INSPECT, "samples": [INSPECTED]},
}


def imported(tmp_path, record, **options):
    path = tmp_path / ("log.json" if "samples" in record else "log.jsonl")
    path.write_text(json.dumps(record))
    if "custom_id" in record:
        join = tmp_path / "requests.jsonl"
        join.write_text(
            json.dumps({"custom_id": "a", "body": {"messages": [ASK]}, "url": "/v1", "method": "POST"})
        )
        options["join"] = join
    with Store.open(tmp_path / "s.db") as store:
        report = import_files(store, [path], **options)
        (sample,) = store.samples()
    return sample, report


WORDS = {"length": "cut", "MAX_TOKENS": "cut", "end_turn": "finished", "unknown": "unknown", "x!": None}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(("said", "end"), WORDS.items())
def test_every_reader_has_the_same_words(reader, said, end, tmp_path):
    record = json.loads(json.dumps(READERS[reader]).replace("SAID", said))
    sample, report = imported(tmp_path, record)
    assert sample.end == (end or "unknown")
    assert sample.meta.get("finish") == {"cut": "length", "finished": "stop"}.get(end)
    assert report.cut == (end == "cut")
    assert report.unknown_ends == ({} if end else {"'x!'": 1})
    assert ("'x!' (1)" in str(report)) == (end is None)
    assert ("cut: 1 samples" in str(report)) == (end == "cut")
    assert sample.response == "one two"
    turns = sample.meta.get("continuation") or []
    assert not any("reason" in name for turn in turns for name in turn)  # the model doesn't say it


RESPONSES = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "one two"}]}
RESPONSES_CUT = {
    "status": "incomplete",
    "incomplete_details": {"reason": "max_output_tokens"},
    "output": [RESPONSES],
}


@pytest.mark.parametrize(
    ("record", "end"),
    [
        (own(truncated=True), "cut"),
        (own(truncated="true"), "cut"),
        (own(is_truncated=1), "cut"),
        (own(truncated=False), "finished"),
        (own(truncated=None), "unknown"),
        (own(), "unknown"),
        (own(finish_reason="stop", truncated=True), "cut"),
        (own(finish_reason="unknown", truncated=False), "finished"),
        (own(response_metadata={"stop_reason": "max_tokens"}), "cut"),
        (own(response_metadata='{"finish_reason": "STOP"}'), "finished"),
        (own(status="incomplete"), "unknown"),  # of an order, for one: it isn't beside an output of Responses
        (langfuse(RESPONSES_CUT), "cut"),
        (langfuse({"status": "incomplete", "output": [RESPONSES]}), "cut"),
        (langfuse({"status": "completed", "incomplete_details": None, "output": [RESPONSES]}), "finished"),
        (langfuse(SAY), "unknown"),
    ],
)
def test_flags_and_details(record, end, tmp_path):
    sample, report = imported(tmp_path, record)
    assert (sample.end, report.unknown_ends) == (end, {})


@pytest.mark.parametrize(
    ("name", "ends"),
    [
        ("ls_anthropic.jsonl", ["cut"] * 3),
        ("lf.jsonl", ["cut"] * 3),
        ("otel.jsonl", ["cut"] * 3),
        ("insp.json", ["finished", "cut", "cut", "cut", "unknown"]),
        ("inter.jsonl", ["cut"] * 5),
    ],
)
def test_public_reports(name, ends, tmp_path):
    if not (REPORTS / name).exists():
        pytest.skip(f"{REPORTS / name} isn't there: this test needs those records")
    with Store.open(tmp_path / "s.db") as store:
        report = import_files(store, [REPORTS / name])
        assert [sample.end for sample in store.samples()] == ends
        surveyed = survey(store)
    assert report.cut == ends.count("cut")
    assert surveyed.total("truncated") == ends.count("cut")  # as agro check counts them
    assert surveyed.total("ended") == len(ends) - ends.count("unknown")


def test_a_store_of_before_is_read_the_same():
    assert Sample("p", "a", meta={"finish": "MAX_TOKENS"}).end == "cut"
    assert Sample("p", "a", meta={"finish": "tool_calls"}).end == "finished"
    assert Sample("p", "a", meta={"finish": ["x"]}).end == "unknown"


@pytest.mark.parametrize(
    ("prompt", "response", "thought"),
    [
        ("q", "a", None),
        ("q", "<think>a", "open"),
        ("q", "<think>a</think>b", "closed"),
        ("q<think>\n", "a", "open"),
        ("q<think>\n", "a</think>b", "closed"),
        ("q<think>\n", "</think>b", "closed"),
        ("q", "a</think>b", "closed"),  # the template opened it
        ("q", "<think>a</think>b\n<think>c", "open"),
        ("Put it in <think> tags, please", "a", None),
        ("q", "The tag <think> opens a thought", None),
        ("q", "<think>a</think>The tag <think> opens it", "closed"),
        ("q", "[THINK]a", "open"),
        ("q<|START_THINKING|>", "a<|END_THINKING|>b", "closed"),
    ],
)
def test_whether_a_thought_is_closed(prompt, response, thought):
    assert thought_in(prompt, response) == thought
    assert Sample(prompt, response).thought == thought
    assert Sample([{"role": "user", "content": "q"}], "a", meta={"thought": "open"}).thought == "open"
