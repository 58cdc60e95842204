"""Which prompts of a store are held out: `data.hold_out` by a hash, near-copies together or not at all.

Two texts are near-copies if the Jaccard index of their 5-grams reaches a threshold, without case, spaces and
a label before or after the text ("Q17: …", "[dev] …"). 5-grams of more than half of all texts are ignored:
they belong to an instruction or a system prompt, and distinguish no texts. A cluster is a connected component
of such pairs. The index is estimated from 64 hashes (MinHash, Broder, 1997), with a standard error of at most
.06, for pairs that agree in one of 16 bands of 4 hashes: 99 % of the pairs with an index of .7, and all but
one in 5,000 with .8.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from agro.config import DataConfig
from agro.errors import Refused
from agro.io.files import write
from agro.io.strictjson import loads
from agro.io.terminal import plain
from agro.store.database import Database
from agro.store.draw_rules import is_held_out
from agro.store.survey import Survey
from agro.types import Text

NEAR_COPIES = "near_copies.json"

Clusters = Mapping[str, str]  # prompt id: smallest id of its cluster; may lack prompts without near-copies
LETTERS = 5  # per gram
BANDS, ROWS = 16, 4
COMMON, LOOKED_AT, FEW = 0.5, 1000, 20  # share of at most so many texts; of fewer than FEW, no gram is common
TOGETHER = 2**16  # letters hashed at once, unless a text is longer: their hashes fit in a core's cache
COMPARED = 2**16  # pairs whose hashes are compared at once
MIXERS = (np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53))  # of MurmurHash3
BASE = np.uint64(0x100000001B3)  # of FNV
LABEL = re.compile(r"^(?:[\[(<{#][^\])>}]{1,32}[\])>}]|[^\s:\])>]{1,16}[:\])>]+)\s*(?=\S)")
TAIL = re.compile(r"(?<=\S)\s*[\[(<{#][^\[\](){}<>]{1,32}[\])>}]$")
CLOSING = ("]", ")", ">", "}")  # what a tail ends with

Grams = NDArray[np.uint64]
Numbers = NDArray[np.int64]


class Split:
    """The prompts of a store that are held out, and those that are trained on."""

    def __init__(self, database: Database) -> None:
        self._db = database
        self._clusters: Clusters | None = None
        self._of_store: dict[float, Clusters] = {}
        self._names: dict[tuple[float, float], str] = {}  # by data.hold_out and data.near_copies

    def use(self, clusters: Clusters | None) -> None:
        """Use these clusters from now on, which may cover more than the store; None: the store's own."""
        self._clusters, self._names = clusters, {}

    def held_out(self, data: DataConfig) -> Callable[[str], bool]:
        """The test whether a prompt id is held out. A prompt without a cluster is decided by its own id. None
        are held out until `data.hold_out_most` is resolved to a share, which a run does when it begins.

        The clusters are those of `use`, or else those of the store at the first call.
        """
        clusters = self._chosen(data)
        if clusters is None:
            return lambda prompt_id: False
        return lambda prompt_id: is_held_out(clusters.get(prompt_id, prompt_id), data.hold_out)

    def name_of(self, data: DataConfig) -> str:
        """The name of what `held_out` returns, which differs if other prompts are held out."""
        clusters, key = self._chosen(data), (data.hold_out, data.near_copies)
        if clusters is None:
            return ""
        if key not in self._names:
            content = json.dumps([data.hold_out, sorted(clusters.items())])
            self._names[key] = blake2b(content.encode(), digest_size=8).hexdigest()
        return self._names[key]

    def _chosen(self, data: DataConfig) -> Clusters | None:
        """The clusters in use; None if nothing is held out."""
        if not data.hold_out or data.hold_out_most is not None:
            return None
        if self._clusters is not None:
            return self._clusters
        if data.near_copies not in self._of_store:
            self._of_store[data.near_copies] = clusters_in(Survey(self._db).each_prompt(), data.near_copies)
        return self._of_store[data.near_copies]


def clusters_in(prompts: Iterable[tuple[str, Text]], near_copies: float) -> dict[str, str]:
    """The smallest id of each near-copy's cluster. The order of prompts doesn't matter."""
    names = cluster_names(dict(prompts), near_copies)
    sizes = Counter(names.values())
    return {prompt_id: name for prompt_id, name in names.items() if sizes[name] > 1}


def write_clusters(folder: Path, clusters: Clusters) -> None:
    """Save the clusters of a run, which a resumed run uses even if its store has grown."""
    write(folder / NEAR_COPIES, json.dumps(dict(clusters), ensure_ascii=False, indent=0) + "\n")


def read_clusters(folder: Path) -> dict[str, str] | None:
    """Read the clusters of a run; None if it has none. Raises `Refused` unless they are a table of ids."""
    path = folder / NEAR_COPIES
    if not path.is_file():
        return None
    try:
        values = loads(path.read_bytes())
    except ValueError as error:
        raise Refused(f"{path}: expected clusters of prompts as JSON: {error}") from None
    if not isinstance(values, dict) or not all(isinstance(value, str) for value in values.values()):
        raise Refused(f"{path}: expected an object of prompt ids, got {values!r:.80}")
    return values


def clusters(texts: Sequence[str], threshold: float) -> Numbers:
    """[N] the index of the first text of each text's cluster.

    `threshold`: the Jaccard index, above 0, from which two texts are near-copies; at 1 they have the same
    letters. The time is linear in the letters of all texts.
    """
    numbers: dict[str, int] = {}
    firsts = np.array([numbers.setdefault(normalized(text), i) for i, text in enumerate(texts)], np.int64)
    if threshold >= 1 or len(numbers) < 2:
        return firsts
    kinds = np.array(list(numbers.values()))  # the index of the first text of each kind
    kind_of_first = _connected(len(kinds), *_near_pairs(list(numbers), threshold))
    kind_index = np.searchsorted(kinds, firsts)
    return kinds[kind_of_first[kind_index]]


def cluster_names(prompts: Mapping[str, Text], threshold: float) -> dict[str, str]:
    """The smallest id of the cluster of each prompt id, whatever the order of the prompts."""
    ids = sorted(prompts)
    labels = clusters([plain(prompts[prompt_id]) for prompt_id in ids], threshold)
    return {prompt_id: ids[label] for prompt_id, label in zip(ids, labels.tolist(), strict=True)}


def normalized(text: str) -> str:
    """Remove case, extra spaces and labels from a text; a label that is all of the text stays."""
    plain = " ".join(unicodedata.normalize("NFKC", text).casefold().split())
    label = LABEL.match(plain)
    plain = plain[label.end() :] if label else plain
    return TAIL.sub("", plain) if plain.endswith(CLOSING) else plain


def _near_pairs(texts: Sequence[str], threshold: float) -> tuple[Numbers, Numbers]:
    """Indices of texts, [P] and [P], that are near-copies of each other; enough pairs to connect them all."""
    signatures, numbers = _signatures(texts)
    pairs: list[Numbers] = []
    for band in range(BANDS):
        key = np.zeros(len(numbers), np.uint64)
        for row in range(band * ROWS, (band + 1) * ROWS):
            key = key * BASE + signatures[:, row]
        order = np.argsort(key, kind="stable")
        is_new = np.append(True, key[order][1:] != key[order][:-1])
        firsts = order[np.flatnonzero(is_new)][np.cumsum(is_new) - 1]
        neighbors = np.append(order[:1], order[:-1])
        pairs += [np.stack([partners, order])[:, ~is_new] for partners in (firsts, neighbors)]
    a, b = np.unique(np.concatenate(pairs, axis=1), axis=1)
    near = np.zeros(len(a), bool)
    for start in range(0, len(a), COMPARED):
        part = slice(start, start + COMPARED)
        near[part] = (signatures[a[part]] == signatures[b[part]]).mean(1) >= threshold
    return numbers[a[near]], numbers[b[near]]


def _signatures(texts: Sequence[str]) -> tuple[NDArray[np.uint32], Numbers]:
    """The minimum of each of 64 hashes over a text's grams, [M,64], and the indices [M] of the texts with any
    grams that aren't common."""
    common = np.empty(0, np.uint64)  # grams of more than half of up to 1,000 texts, evenly spaced
    looked_at = [texts[i] for i in np.linspace(0, len(texts) - 1, min(len(texts), LOOKED_AT)).astype(int)]
    if len(looked_at) >= FEW:
        per_text = [np.unique(_grams([text])[0]) for text in looked_at]
        grams, counts = np.unique(np.concatenate(per_text), return_counts=True)
        common = grams[counts > COMMON * len(looked_at)]
    # Multiplying by an odd number permutes the integers of 32 bits.
    factors = np.random.default_rng(0).integers(0, 2**31, BANDS * ROWS, dtype=np.uint32) * np.uint32(2) + 1
    signatures, numbers = [], []
    blocks = np.cumsum([len(text) for text in texts]) // TOGETHER
    for start, end in pairwise([0, *np.flatnonzero(np.diff(blocks)) + 1, len(texts)]):
        grams, text_of = _grams(texts[start:end])
        distinct = ~np.isin(grams, common)
        grams, text_of = (grams[distinct] >> np.uint64(32)).astype(np.uint32), text_of[distinct]
        present, begins = np.unique(text_of, return_index=True)
        numbers.append(start + present)
        hashes = np.empty((len(present), len(factors)), np.uint32)
        for j, factor in enumerate(factors if len(present) else ()):
            hashes[:, j] = np.minimum.reduceat(grams * factor, begins)
        signatures.append(hashes)
    return np.concatenate(signatures), np.concatenate(numbers)


def _grams(texts: Sequence[str]) -> tuple[Grams, Numbers]:
    """The hashes of all grams in the order of texts, and each one's text. A shorter text is one gram."""
    padded = [text.ljust(LETTERS) for text in texts]
    codes = "".join(padded).encode("utf-32-le", "surrogatepass")
    letter = np.frombuffer(codes, np.uint32).astype(np.uint64)
    lengths = np.array([len(text) for text in padded])
    ends = np.repeat(np.cumsum(lengths), lengths)
    grams = np.zeros(len(letter) - LETTERS + 1, np.uint64)
    for offset in range(LETTERS):
        grams = grams * BASE + letter[offset : offset + len(grams)]
    for mixer in MIXERS:
        grams = (grams ^ grams >> np.uint64(33)) * mixer
    is_within = np.arange(len(grams)) + LETTERS <= ends[: len(grams)]
    return grams[is_within], np.repeat(np.arange(len(texts)), lengths)[: len(grams)][is_within]


def _connected(n: int, a: Numbers, b: Numbers) -> Numbers:
    """[n] the smallest node that the edges (`a`, `b`) connect each node with."""
    labels = np.arange(n)
    while True:
        lower = np.minimum(labels[a], labels[b])
        previous = labels.copy()
        for ends in (a, b):
            np.minimum.at(labels, previous[ends], lower)
            np.minimum.at(labels, ends, lower)
        labels = labels[labels]
        if (labels == previous).all():
            return labels
