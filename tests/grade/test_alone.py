"""The graders without agro: a process in which `import agro` fails."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

PROGRAM = r"""
import json, sys
sys.modules["agro"] = None
from contextlib import closing
from agro_grade.code import Case, ProgramGrader
from agro_grade.mathematics import grade

answers = [r"Half of it: $\boxed{\frac12}$.", r"\boxed{(x+1)^2}", r"\boxed{x^2+1}", "It isn't 7."]
expected = ["0.5", "x^2+2x+1", "x^2+2x+1", "7"]
grades = [grade(*pair).value for pair in zip(answers, expected)]
unread = grade(r"\boxed{\mathbb{Q}}", "a number of two digits")
doubles = Case(runs=(("3\n", "6\n"), ("4\n", "8\n")), tests=("assert double(2) == 4",))
program = "def double(x): return 2 * x\nif __name__ == '__main__': print({})"
with closing(ProgramGrader.local("limits", timeout=20.0)) as grader:
    passed = [grader.grade(program.format(text), doubles).passed for text in ("double(int(input()))", "6")]
    unfit = grader.grade(program, Case(tests=("assert double(",)))
assert not [name for name in sys.modules if name.startswith("agro.")]
print(json.dumps([grades, [unread.value, unread.reason], passed, [unfit.passed, unfit.problem[:33]]]))
"""


def test_answers_and_programs_are_graded_where_agro_cannot_be_imported() -> None:
    """(x + 1)² is x² + 2x + 1, which SymPy says; printing 6 for each input passes two of three tests."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [
        [1.0, 1.0, 0.0, 0.0],
        [None, "no mathematics can be read in the sample's answer 'a number of two digits'"],
        [1.0, 2 / 3],
        [None, "the sample's tests can't be run: "],
    ]
