"""Passports of several objectives, one process a core."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch

from agro.proof.claims import CLAIMS
from agro.proof.descent import Path
from agro.proof.ends import end
from agro.proof.measuring import Row, Subject
from agro.proof.passport import passport

WHERES = ("policy", "reference", "uniform")  # behaviors whose descent is drawn


@dataclass(frozen=True)
class Measured:
    """Of one objective: its passport, and where descent went from π_ref, by number of its claims and
    behavior."""

    rows: list[Row]
    paths: dict[tuple[int, str], Path]


def measure(name: str, descents: bool) -> Measured:
    """`descents`: with its paths."""
    torch.set_num_threads(1)  # the tensors are small: a second thread would only wait for the first
    rows, paths = list(passport(name)), {}
    for i, claims in enumerate(CLAIMS[name] if descents else ()):
        subject = Subject(name, claims)
        for where in WHERES:
            if claims.updates and where in subject.behaviors:
                paths[i, where] = end(subject, where)
    return Measured(rows, paths)


def prove(names: Sequence[str], *, descents: bool = False) -> dict[str, Measured]:
    """Each of `names`, in this order; `descents`: with their paths."""
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    workers = min(len(names), cores)
    if workers == 1:
        return {name: measure(name, descents) for name in names}
    longest_first = sorted(names, key=lambda name: -sum(c.updates for c in CLAIMS[name]))
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        done = dict(zip(longest_first, pool.map(partial(measure, descents=descents), longest_first)))
    return {name: done[name] for name in names}
