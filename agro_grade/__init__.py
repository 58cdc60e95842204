"""Graders of answers in mathematics and of programs, usable without agro.

    from agro_grade.mathematics import grade

    grade(r"Half of it: $\\boxed{\\frac12}$.", "0.5").value  # 1.0

    from contextlib import closing

    from agro_grade.code import Case, ProgramGrader

    with closing(ProgramGrader.local("limits")) as grader:
        case = Case(tests=("assert add(1, 2) == 3",))
        grader.grade("def add(a, b): return a + b", case).passed  # 1.0

All modules except `rewards`, which turns the graders into agro's rewards, import only the standard library,
and math-verify (SymPy) if a comparison needs it.
"""
