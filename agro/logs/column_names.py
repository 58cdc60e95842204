"""Words by which people name the columns of a log and judge responses, in several languages.

All are in lower case and without accents, as `plain` makes them.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence

from agro.logs.labels import WORDS, count_in, share_in, word_of

words = str.split
# Words in the names of columns, the most telling first.
NAMES: Mapping[str, Sequence[str]] = {
    "prompt": words(
        "prompt question instruction query frage anfrage pregunta domanda pergunta vraag request "
        "problem task consulta requete demande richiesta aufgabe brief anliegen user human customer "
        "kunde client cliente usuario ask asked eingabe entrada message nachricht mensaje messaggio "
        "utterance issue input title subject context q chat conversation history dialog dialogue"
    ),
    "response": words(
        "response completion answer reply antwort reponse respuesta risposta resposta antwoord "
        "generation generated predicted assistant assistent asistente output bot chatbot copilot "
        "prediction pred candidate hypothesis ausgabe salida sortie suggestion draft entwurf "
        "vorschlag ai ki ia llm model modell result solution text content code sql a"
    ),
    "reward": words(
        "reward score rating bewertung grade thumbs thumb feedback stars star note sterne etoiles "
        "estrellas vote quality satisfaction helpfulness helpful correct correctness label points "
        "verdict judgment judgement urteil evaluation marking mark like liked accepted passed pass "
        "success csat nps daumen reaction assessment beurteilung zensur einschatzung grading review "
        "judge satisfied helped useful usefulness selected gute qualitat qualite calidad wertung "
        "punkte zufriedenheit zufrieden valoracion calificacion nota voto voti avis appreciation "
        "punteggio puntuacion avaliacao beoordeling cijfer approved approval util utile hilfreich "
        "nuttig geholfen resolved solved resuelto resolu risolto resolvido gelost outcome accuracy "
        "acc f1 em rouge bleu"
    ),
    "chosen": words(
        "chosen preferred better best winner winning good accepted positive besser meilleure "
        "meilleur mejor migliore melhor beter preferee"
    ),
    "rejected": words(
        "rejected refused other verworfen dispreferred worse worst loser losing bad declined "
        "negative schlechter moins pire peor peggiore pior slechter"
    ),
    "preference": words(
        "winner winning preference preferred better best choice chosen pick picked vote label "
        "verdict judgment judgement selected bevorzugt besser gewinner sieger prefere preferee "
        "meilleure gagnant mejor preferida preferita ganador migliore voorkeur melhor"
    ),
    "rank": words("rank ranking rang place"),
    "messages": words("messages conversation conversations dialog dialogue chat turns history transcript"),
    "answer": words("expected gold golden reference truth ideal target ground correct musterlosung referenz"),
}
# Parts of longer words, such as Kundenanfrage, geantwortet and botanswer.
STEMS: Mapping[str, Sequence[str]] = {
    "prompt": words("frage prompt question pregunt domand pergunt instruction"),
    "response": words("antwort answer response reponse respuesta risposta resposta antwoord entwurf reply"),
    "reward": words(
        "bewert wertung punkt benotung qualitat zufrieden feedback score satisf valoraci calific evalua"
    ),
    "preference": words("bevorzug preferi prefere"),
    "chosen": words("besser preferi prefere bevorzug"),
    "rejected": words("schlecht"),
}
# What a column with one of these in its name has: words about a response, and numbers that aren't judgments.
ASIDE: Mapping[str, frozenset[str]] = {
    "text": frozenset(
        words(
            "comment comments remark remarks notes explanation rationale reason reasoning "
            "justification why warum kommentar anmerkung begrundung bemerkung commentaire remarque "
            "comentario comentarios commento motivo toelichting opmerking observacao tag tags "
            "bewerter bewerterin prufer category kategorie categorie categoria topic thema theme "
            "language sprache langue locale country department team annotator reviewer rater name "
            "email mail id uuid url link version type status source system date time datum zeit "
            "error file path"
        )
    ),
    "number": frozenset(
        words(
            "duration dauer duree duracion durata seconds second sekunden sec secs ms s latency "
            "token tokens count anzahl nombre id version temperature cost price kosten usd eur year "
            "jahr age alter round runde durchgang step turn turns confidence konfidenz probability "
            "agreement n nr num number index position page time zeit temps length laenge lange "
            "chars words attempts retries size priority prio minutes stunden tage days hours wait "
            "total average mean avg min max scale level filter threshold annotators raters "
            "reviewers retrieval similarity logprob"
        )
    ),
}
# Who speaks in a dialog.
ASSISTANTS = frozenset(
    words(
        "assistant bot gpt ai ki ia model agent chatbot support assistent asistente agente "
        "assistente advisor operator"
    )
)
USERS = frozenset(
    words(
        "user human customer client kunde kundin cliente usuario utilisateur utente guest gast "
        "passenger rider driver tenant donor applicant employee taxpayer teacher learner parent "
        "shopper buyer traveller traveler subscriber resident besucher fahrgast burger burgerin "
        "mieter anrufer nutzer nutzerin visiteur voyageur cittadino cidadao patient student caller "
        "visitor player you me nutzer klant usager citizen member"
    )
)


def plain(text: str) -> str:
    """In lower case and without accents."""
    return "".join(c for c in unicodedata.normalize("NFKD", text.casefold()) if not unicodedata.combining(c))


def steps_of(path: str) -> list[list[str]]:
    """The words of a column's name; of a nested one those of its last step first."""
    spaced = re.sub(r"([a-z])([A-Z])", r"\1 \2", path)
    return [re.findall(r"[^\W_]+", plain(step)) for step in reversed(spaced.split("."))]


def likeness(token: str, role: str) -> float:
    """How well a word says that a column has this role, from 0 to 1."""
    names = NAMES[role]
    word = token if token in names or token == "notes" else token.removesuffix("s")
    if word in names:
        return 1 - names.index(word) / len(names)
    return 0.5 if any(stem in token for stem in STEMS.get(role, ())) else 0.0


# What words of judgments are worth, besides those that need no --reward-map.
_GOOD = words(
    "aprovada aprovado aprobado aceptado approuve approvato goedgekeurd freigegeben angenommen good "
    "great correct right pass passed helpful accepted accept approved success successful excellent "
    "ok okay perfect useful solved resolved valid acceptable ja oui si sim da richtig gut korrekt "
    "hilfreich bestanden correcte bon bonne utile correcto bueno buena util corretto buono correto "
    "bom goed juist hoch t y ✅ ✓ ✔ 😀 🙂 😊 😃 😍 ☺"
)
_BAD = words(
    "reprovada reprovado rechazado suspenso refuse rejete respinto afgekeurd abgelehnt bad "
    "incorrect wrong fail failed failure unhelpful rejected reject denied unsatisfied poor terrible "
    "awful useless unsolved unresolved invalid unacceptable nein non nao nee falsch schlecht runter "
    "faux mauvais mauvaise incorrecte inutile incorrecto malo mala sbagliato scorretto cattivo "
    "errado ruim slecht fout f n ❌ ✗ ✘ ☹ 🙁 😞 😡 😠 👎"
)
_MIDDLE = words(
    "neutral partial mixed tie meh average mediocre fair mittel moyen regular medio mittelmassig 😐"
)
WORTH: dict[str, float | None] = {
    **dict.fromkeys(_GOOD, 1.0),
    **dict.fromkeys(_BAD, 0.0),
    **dict.fromkeys(_MIDDLE, 0.5),
    **dict.fromkeys(("ok", "okay", "fair"), 0.5),
    **dict.fromkeys(words("befriedigend ausreichend mangelhaft ungenugend"), 0.5),  # see MARKS
    **dict.fromkeys(("very satisfied", "very helpful", "strongly agree"), 1.0),
    **dict.fromkeys(words("satisfied agree"), 0.75),
    **dict.fromkeys(words("dissatisfied disagree"), 0.25),
    **dict.fromkeys(("very dissatisfied", "very unsatisfied", "strongly disagree"), 0.0),
    **dict.fromkeys(("neither agree nor disagree", "neither", "so so", "teils teils"), 0.5),
}
VERY = frozenset(words("very sehr tres muy molto muito zeer totally strongly"))
MARKS = {  # those of German schools
    "sehr gut": 1.0,
    "gut": 0.8,
    "befriedigend": 0.6,
    "ausreichend": 0.4,
    "mangelhaft": 0.2,
    "ungenugend": 0.0,
}
_PARTLY = words("partly partially partial somewhat teilweise partiellement partiel parcialmente half almost")
_NOT = words("not nicht pas no non niet não")
# What is written where nothing is known.
MISSING = frozenset(
    words(
        "null none nan nil na n/a #n/a #na n.a. - -- – — ? . k.a. s/o n.d. nd n/d unknown unsure "
        "unclear unrated skip skipped pending offen pendente pendiente keine ausstehend"
    )
) | {
    *("k. a.", "keine angabe", "nicht bewertet", "not rated", "no rating", "no feedback", "not answered"),
    *("no answer", "no response", "non note", "sans avis", "sans note", "sin valorar", "sin calificar"),
    *(
        "no aplica",
        "ns/nc",
        "not reviewed",
        "not applicable",
        "empty",
        "blank",
        "weiss nicht",
        "to do",
        "tbd",
        "s/d",
        "sin dato",
    ),
}


def is_missing(text: str) -> bool:
    """Whether a text says that nothing is known, also in brackets."""
    return plain(text).strip().strip("()[]<>") in MISSING


_WITH_COMMENT = re.compile(r"(\d+(?:[.,]\d+)?) ?(?:[:(–].*| [^\d/%]+)")


def worth_of(word: str) -> float | None:
    """Of a word, stars, a percentage or a fraction; None where it says that nothing is known.

    Raises `KeyError` for others.
    """
    word = word_of(word)
    if is_missing(word):
        return None
    known = share_in(word)
    if (known := count_in(word) if known is None else known) is not None:
        return known
    if number := _WITH_COMMENT.fullmatch(word):
        return float(number[1].replace(",", "."))
    if word in WORDS:
        return WORDS[word]
    said = plain(word)
    begin = re.split(r"\s*[:(–—;,]\s*|\s+-\s+", said)[0]
    for each in (said, begin):
        if each in WORTH:
            return WORTH[each]
    first, _, others = begin.partition(" ")
    if first in VERY and others in WORTH:
        return WORTH[others]
    if first in _PARTLY and WORTH.get(others) == 1.0:
        return 0.5
    if first in _NOT and others in WORTH:
        return 0.0 if WORTH[others] else 1.0
    raise KeyError(word)


YES_NO = frozenset(words("yes no y n t f true false ja nein oui non si da ne"))
# What a column of preferences says where neither of two is better, and how it names the first and the second.
TIES = frozenset(
    words(
        "tie ties tied both equal equals draw none neither same 0 bothbad egal gleich gleichwertig "
        "unentschieden egalite empate pareggio gelijk remis identical similar ="
    )
) | {"no preference", "about the same", "no difference", "both good", "both bad", "pas de preference"}
SIDES: Sequence[frozenset[str]] = tuple(
    frozenset(group.split())
    for group in ("a 1 first left links erste premier primera prima x", "b 2 second right rechts zweite y")
)
