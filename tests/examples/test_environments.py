"""The environments of examples/: the result of a call, and the message of a mistake in it; values by hand."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from agro import config
from agro.errors import Refused
from agro.io.worker import load_file
from agro.models.policy import Policy
from agro.models.pretrained import new_model
from agro.rollout.envs import Mistake, Turn
from agro.rollout.envs.process import load_environment
from agro.types import Prompt
from reproductions.calculator.run import demonstrate

FOLDER = Path(__file__).parents[2] / "examples/environments"
calculator, search = load_file(str(FOLDER / "calculator.py")), load_file(str(FOLDER / "search.py"))
Calculator, calculate, Search, bm25 = calculator.Calculator, calculator.calculate, search.Search, search.bm25
DOCUMENTS = ["The cat sat on the mat.", "A dog barked at the cat, and the cat ran.", "Nothing to see here."]


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("37*46", "1702"),
        (" (1+2)*3 - -4", "13"),
        ("7//2 + 7%4", "6"),
        ("1/8", "0.125"),
        ("2**-1", "0.5"),
        ("2/3", "0.666666666667"),
        ("10**100", "1" + "0" * 100),
        ("1e3", "1000"),
        ("0**0", "1"),
    ],
)
def test_the_value_of_an_expression(expression, value):
    said = Calculator().step(None, f"so <call>{expression}</call>")
    assert said == Turn(f"<result>{value}</result>", info={"tool": "calculator"})


MISTAKES = {
    "division by zero": ("1/0", "1%0"),
    "too large": ("9**9**9", "2**-99999", "10**200", "1e308*10", "1e999"),
    "not a real number": ("(-1)**0.5",),
    "longer than 200": ("1" * 201,),
    "not an arithmetic": (
        *("1+", "__import__('os')", "True+1", "'a'*9", "x", "1 if 1 else 2", "[1]*9", "1<2", "1j", "\0"),
        *("(" * 190 + "1", ""),
    ),
}


@pytest.mark.parametrize(
    ("problem", "expression"), [(problem, each) for problem, all_of in MISTAKES.items() for each in all_of]
)
def test_a_mistake_in_an_expression_is_said(problem, expression):
    with pytest.raises(Mistake, match=problem):
        calculate(expression)
    said = Calculator(error="?").step(None, f"<call>{expression}</call>")
    assert (said.observation, said.done, said.info["tool"]) == ("<result>?</result>", False, "calculator")


def test_200_characters_are_calculated():
    assert calculate("-" * 199 + "1") == -1


@pytest.mark.parametrize("text", ["1702", "<call>1+1", "1+1</call>", "</call><call>1+1"])
def test_a_turn_without_a_call_is_the_last(text):
    assert Calculator().step(None, text) == Turn(done=True)


def test_the_last_opening_begins_the_call():
    assert Calculator().step(None, "<call>9<call>1+1</call>\n").observation == "<result>2</result>"


def test_bm25_by_hand():
    # Two documents of 2 and 4 words, mean 3; "a" is once in the first and twice in the second.
    # idf = ln(1 + 0.5/2.5).
    idf = math.log(1.2)
    first, second = 2.2 / (1 + 1.2 * (0.25 + 0.75 * 2 / 3)), 2 * 2.2 / (2 + 1.2 * (0.25 + 0.75 * 4 / 3))
    expected = [idf * first, idf * second]
    assert bm25(["a", "a"], [["a", "b"], ["a", "a", "c", "d"]]) == pytest.approx(expected, rel=1e-12)
    assert bm25(["z"], [["a"], []]) == [0.0, 0.0]


def test_search_gives_the_best_documents():
    search = Search(top=2, width=23)
    state = search.reset(Prompt("who?", columns={"documents": DOCUMENTS}))
    for call, result in {
        "CAT, cat!": f"{DOCUMENTS[1][:23]}\n{DOCUMENTS[0]}",
        "zebra": "error: nothing found",
        "?!": "error: no words to search for",
    }.items():
        assert search.step(state, f"<call>{call}</call>").observation == f"<result>{result}</result>"


def test_the_paragraphs_of_one_text_are_documents():
    search = Search(column="book")
    assert search.reset(Prompt("p", columns={"book": "one\ntwo\n \n\nthree"})) == ["one\ntwo", "three"]
    with pytest.raises(ValueError, match="column book: expected a text or a list of texts, got None"):
        search.reset(Prompt("p"))


def test_options_are_checked():
    with pytest.raises(Refused, match=r"options\.top: expected"):
        load_environment(config.EnvironmentConfig(name=f"{FOLDER}/search.py:Search", options={"top": 0}))


def test_the_calculator_in_an_episode(tmp_path):
    options = {"call": ["a", "b"], "result": "c{}c", "error": "h"}
    settings = config.EnvironmentConfig(name=f"{FOLDER}/calculator.py:Calculator", options=options)
    model = config.NewModel(alphabet="abcdefgh", hidden=16, layers=1, heads=2, context=24)
    new_model(tmp_path, model, 0)
    policy = Policy.load(config.PolicyConfig(model=str(tmp_path)))
    turns = ["aeb", "f"]  # "e" is no expression
    (s,) = demonstrate(load_environment(settings), policy.encoder, Prompt("h"), turns)
    assert (s.response, s.meta["tool_calls"]) == ("aebchcf", 1)
    assert s.meta["turn_info"][0]["error"] == "not an arithmetic expression"
