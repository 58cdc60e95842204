"""Search in the documents of a prompt, ranked by BM25.

[environment]
name = "examples/environments/search.py:Search"
options = { column = "documents", top = 2 }
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from agro.errors import Refused
from agro.rollout.envs import Mistake, Tool
from agro.types import Prompt

K1, B = 1.2, 0.75  # the usual values


class Search(Tool):
    """The best documents for the words of a call; the first of equal ones.

    Args:
        column: of the prompts file: a list of texts, or one text, whose paragraphs are the documents.
        top: documents per call at most.
        width: characters of a document that are shown.
        options: see `Tool`.
    """

    name = "search"

    def __init__(self, column: str = "documents", top: int = 1, width: int = 500, **options: Any) -> None:
        super().__init__(**options)
        for name, value in (("top", top), ("width", width)):
            if not isinstance(value, int) or value < 1:
                where = f"environment.options.{name}"
                raise Refused(f"{where}: expected a whole number, 1 or more, got {value!r:.80}")
        self.column, self.top, self.width = column, top, width

    def reset(self, prompt: Prompt) -> list[str]:
        documents = prompt.columns.get(self.column)
        if isinstance(documents, str):
            parts = re.split(r"\n\s*\n", documents)
            documents = [part.strip() for part in parts if part.strip()]
        is_list = isinstance(documents, list) and len(documents) > 0
        if not is_list or not all(isinstance(x, str) for x in documents):
            raise ValueError(
                f"column {self.column}: expected a text or a list of texts, got {documents!r:.80}"
            )
        return documents

    def use(self, state: list[str], call: str) -> str:
        query = words(call)
        if not query:
            raise Mistake("no words to search for")
        scores = bm25(query, [words(text) for text in state])
        found = [i for i, score in enumerate(scores) if score > 0]
        if not found:
            raise Mistake("nothing found")
        found.sort(key=lambda i: -scores[i])
        return "\n".join(state[i][: self.width] for i in found[: self.top])


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text.casefold())


def bm25(query: Sequence[str], documents: Sequence[Sequence[str]]) -> list[float]:
    """Each document's score for the query's words (Robertson and Zaragoza 2009, with an idf above 0)."""
    counts = [Counter(document) for document in documents]
    mean_length = sum(map(len, documents)) / len(documents) or 1.0
    scores = [0.0] * len(documents)
    for word in dict.fromkeys(query):
        matches = sum(word in c for c in counts)
        idf = math.log(1 + (len(documents) - matches + 0.5) / (matches + 0.5))
        for i, c in enumerate(counts):
            length = len(documents[i]) / mean_length
            scores[i] += idf * c[word] * (K1 + 1) / (c[word] + K1 * (1 - B + B * length))
    return scores
