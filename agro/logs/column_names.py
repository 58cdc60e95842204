"""Words in the names of columns and in judgments, for a proposal that a person looks at before it is taken.

They needn't be complete: what they don't say, the content does, and what they say wrongly is shown. All are
in lower case and without accents, as `plain` makes them. One of up to four letters is a whole word, also with
an s at its end; a longer one may be a part of a word, such as frage in Kundenanfrage.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Collection, Mapping, Sequence

from agro.logs.labels import WORDS, count_in, share_in, word_of, worded_number

words = str.split
# The most telling first.
NAMES: Mapping[str, Sequence[str]] = {
    "prompt": words(
        "prompt question instruction query frage pregunt domand pergunt vraag request problem task ask "
        "asked consult demand richiest aufgab eingab anliegen user human customer kunde client usuario "
        "entrada message nachricht mensaj messag utterance brief issue input title subject context q "
        "chat conversation history dialog"
    ),
    "response": words(
        "response completion answer reply replied antwort repons respuest rispost respost antwoord "
        "generat assistant assistent output bot chatbot copilot predict pred candidate hypothesis "
        "ausgab salida sortie suggestion draft entwurf vorschl ai ki ia llm model result solution text "
        "content code sql a"
    ),
    "reward": words(
        "reward score rating rated rate bewert wertung beurteil grade grading mark thumb feedback star "
        "stern etoil estrell quality qualit gute note nota voto vote helpful useful hilfreich nutzl "
        "util utile correct label punkt point punt verdict judge judgm urteil evalu valut valor "
        "calific avali beoordel cijfer like accepted accuracy acc passed pass success csat nps "
        "reaction assess review satisf zufrieden avis apprec approv resolved solved selected outcome "
        "match f1 em rouge bleu"
    ),
    "preference": words(
        "winner winning wins win prefer better best choice chosen pick picked select vote label "
        "verdict judge judgm compar reject bevorzug besser gewinn sieger gagnant meilleur ganador "
        "mejor miglior vincitor voorkeur melhor beter loser loses worse worst schlecht perdant "
        "perdedor"
    ),
    "chosen": words(
        "chosen prefer better best winner winning good accepted besser bevorzug meilleur mejor miglior melhor"
    ),
    "rejected": words(
        "rejected refused dispref worse worst loser losing bad declined schlecht moins pire peor peggio"
    ),
    "messages": words("message conversation dialog chat turns history transcript"),
    "answer": words("expected gold golden reference truth ideal target ground correct muster referenz"),
}
# Of something beside prompt, response and judgment.
ASIDE = words(
    "comment kommentar remark explan rationale reason justif why warum notes anmerk begrund "
    "commentaire motivo tag category kategor categor topic theme language lang sprache langue country "
    "team annotator reviewer rater name email mail id uuid url version type status source system date "
    "datum zeit count anzahl nombre num number n nr token temperature year age turn step round "
    "confidence agreement index position page length chars attempt retries size priority prio hours "
    "total scale level threshold votes ratings retrieval similarity logprob seed file path"
)
# What is better where there is less of it; the costs are judgments only where there is nothing else.
LOWER = words(
    "toxic tossic fel bledy toxiz error erro fout fouten fehler erreur mistake errori wrong incorrect "
    "inaccur irrelev harmful harms badness halluc violat complain penalt penalty defect flaw bug bias "
    "rude offens spam severity unsafe unhelp rank ranking rang place schulnote perplex ppl loss wer "
    "cer distance edits regret dislike churn misses rmse mae bounce abandon escalat mislead contradict "
    "refusal verbos klacht quejas reclam beschwerd posizion fallos danger risk plagiar repetit fail "
    "failu failed reject problematic"
)
COSTS = words(
    "time latenc latenz delay duration dauer duree seconds sekunden secs ms cost kosten coste costo "
    "custo cout price preis"
)
NOT = frozenset(
    words("not nicht no non pas nie niet nao free without ohne sans sin senza never kein keine isn less")
)
WORSE = words(
    "worse worst reject bad los loses loser lost lose schlecht pire peor peggio pior slecht verlier "
    "perd inferior weaker"
)


def plain(text: str) -> str:
    """In lower case and without accents."""
    return "".join(c for c in unicodedata.normalize("NFKD", text.casefold()) if not unicodedata.combining(c))


def steps_of(path: str) -> list[list[str]]:
    """The words of a column's name; of a nested one those of its last step first."""
    spaced = re.sub(r"([a-z])([A-Z])|([A-Za-z]{3})(\d)", r"\1\3 \2\4", path)
    return [re.findall(r"[^\W_]+", plain(step)) for step in reversed(spaced.split("."))]


def has(token: str, stems: Collection[str]) -> str | None:
    """The stem that a word has, of `ASIDE` at its beginning: conversion is no version."""
    short = token.removesuffix("s")
    for stem in stems:
        is_part = stem in token if stems is not ASIDE else token.startswith(stem)
        if token == stem or short == stem or (len(stem) > 4 and is_part):
            return stem
    return None


def likeness(token: str, role: str) -> float:
    """How well a word says that a column has this role, from 0 to 1."""
    stem = has(token, NAMES[role])
    return 0.0 if stem is None else 1 - NAMES[role].index(stem) / len(NAMES[role])


def is_negated(tokens: Collection[str], stems: Collection[str]) -> bool:
    """Whether words say that of a quality there is less, or that something isn't: unsafe, not helpful. Two
    such words say the opposite: no errors, harmless."""
    count = sum(has(token, stems) is not None for token in tokens)
    count += sum(token in NOT or (token.endswith(("less", "free")) and len(token) > 4) for token in tokens)
    return count % 2 == 1


_GOOD = words(
    "good great correct right pass passed helpful accepted accept approved success excellent perfect "
    "useful solved resolved valid ja oui si sim gut richtig bon bonne correcto bueno buono bom "
    "satisfied agree high t y fully best ✅ ✓ ✔ 😀 🙂 😊 😃"
)
_BAD = words(
    "bad incorrect wrong fail failed unhelpful rejected reject denied poor terrible awful useless "
    "unsolved unresolved invalid nein falsch schlecht faux mauvais incorrecto malo sbagliato cattivo "
    "errado ruim dissatisfied unsatisfied disagree low worst f n ❌ ✗ ✘ 🙁 😞 😡"
)
_MIDDLE = words(
    "neutral partial partially partly mixed average mediocre fair ok okay neither meh medium mittel 😐"
)
WORTH = dict.fromkeys(_GOOD, 1.0) | dict.fromkeys(_BAD, 0.0) | dict.fromkeys(_MIDDLE, 0.5)
# Say nothing without the name of their column.
PLAIN = frozenset(words("yes no y n t f true false ja nein oui non si sim high medium low"))
_MISSING = frozenset(
    words("null none nan nil na n/a k.a. - -- – — ? . unknown unsure skip skipped pending tbd")
)


def is_missing(text: str) -> bool:
    """Whether a text says that nothing is known, also in brackets."""
    return plain(text).strip().strip("()[]<>") in _MISSING


def worth_of(word: str) -> float | None:
    """Of a word, stars, a percentage or a fraction; None where it says that nothing is known.

    Raises `KeyError` for others.
    """
    word = word_of(word)
    if is_missing(word):
        return None
    for number in (share_in(word), count_in(word), worded_number(word), WORDS.get(word)):
        if number is not None:
            return number
    tokens = re.findall(r"\w+|[^\w\s]", plain(re.split(r"\s*[:(–—;,]\s*|\s+-\s+", word)[0])) or [word]
    said = [WORTH[token] for token in tokens if token in WORTH]
    others = [token for token in tokens if token not in WORTH and token not in NOT]
    if not said or len(others) > 1:
        raise KeyError(word)
    number = 0.5 if 0.5 in said else said[0]
    return float(number == 0) if not NOT.isdisjoint(tokens[:-1]) else number


# What a column of preferences says where neither of two is better, and how it names the first and the second.
TIES = frozenset(
    words(
        "tie ties tied both equal equally draw none neither same 0 egal gleich unentschieden pareggio "
        "empate similar identical = difference preference"
    )
)
SIDES: Sequence[frozenset[str]] = tuple(
    frozenset(group.split())
    for group in ("a 1 first left links erste premier primera prima x", "b 2 second right rechts zweite y")
)
