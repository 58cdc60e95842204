"""Search in the documents that a prompt brings along, ranked by BM25."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from agro.envs.tool import Mistake, Tool
from agro.errors import Refused
from agro.types import Prompt

K1, B = 1.2, 0.75  # the usual values


class Search(Tool):
    """The best documents for the words of a call; ties go to the one that stands first.

    Args:
        column: of the prompts file: a list of texts, or one text, whose paragraphs are the documents.
        top: documents a call gives at most.
        width: characters of a document that are shown.
        options: see `Tool`.
    """

    name = "search"

    def __init__(self, column: str = "documents", top: int = 1, width: int = 500, **options: Any) -> None:
        super().__init__(**options)
        for name, value in (("top", top), ("width", width)):
            if not isinstance(value, int) or value < 1:
                raise Refused(
                    f"environment.options.{name}: expected a whole number, 1 or more, got {value!r:.80}"
                )
        self.column, self.top, self.width = column, top, width

    def reset(self, prompt: Prompt) -> list[str]:
        found = prompt.columns.get(self.column)
        if isinstance(found, str):
            found = [part.strip() for part in re.split(r"\n\s*\n", found) if part.strip()]
        if not isinstance(found, list) or not found or not all(isinstance(x, str) for x in found):
            raise ValueError(f"column {self.column}: expected a text or a list of texts, got {found!r:.80}")
        return found

    def use(self, state: list[str], call: str) -> str:
        query = words(call)
        if not query:
            raise Mistake("no words to search for")
        scores = bm25(query, [words(text) for text in state])
        best = sorted((i for i, s in enumerate(scores) if s > 0), key=lambda i: (-scores[i], i))[: self.top]
        if not best:
            raise Mistake("nothing found")
        return "\n".join(state[i][: self.width] for i in best)


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text.casefold())


def bm25(query: Sequence[str], documents: Sequence[Sequence[str]]) -> list[float]:
    """The score of each document for the query's words (Robertson and Zaragoza 2009, with an idf that is above 0)."""
    counts = [Counter(document) for document in documents]
    mean = sum(map(len, documents)) / len(documents) or 1.0
    scores = [0.0] * len(documents)
    for word in dict.fromkeys(query):
        holding = sum(word in c for c in counts)
        idf = math.log(1 + (len(documents) - holding + 0.5) / (holding + 0.5))
        for i, c in enumerate(counts):
            scores[i] += idf * c[word] * (K1 + 1) / (c[word] + K1 * (1 - B + B * len(documents[i]) / mean))
    return scores
