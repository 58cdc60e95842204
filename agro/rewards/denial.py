r"""Whether a solution denies its answer: "not 5", "5 is wrong", "at most 5", "half of 5", "5, otherwise 6".

Three places are read. What stands before the answer: a negation, a verb such as "rules out", a factor such as
"twice", or a clause such as "it is false that". What follows it: "is wrong", "squared", or a sentence such as
"No." The answer itself: "≥ 5". Standard library only.
"""

from __future__ import annotations

import re

NEAR = 200  # characters around an answer in which it is denied

_ADVERBS = (
    r"(?:actually|all|also|both|certainly|clearly|definitely|ever|just|necessarily|obviously|possibly|really|simply|"
    r"still|surely|truly)"
)
_FILLER = (
    rf"(?:a|an|the|is|be|are|equals?|to|that|it|its|true|correct|case|answer|result|value|final|only|exactly|"
    rf"number|choice|option|=|:|{_ADVERBS})"
)

# Before the answer. Only fillers may stand between these words and the answer, which is their object.
_NOT = r"(?:\b(?:not|never|cannot|nor|neither)\b|n['’]t\b|\\neq?(?![a-z])|\\(?:not|lnot|neg)\b|≠|!=)"
_EXCEPT = (
    r"\b(?:(?:any|every)thing\s+but|except(?:\s+for)?|besides|apart\s+from|excluding|far\s+from|hardly|other\s+than"
    r"|(?:different|distinct)\s+from|unequal\s+to|differ(?:s|ed)?\s+from"
    r"|(?:fail(?:s|ed)?|refuse[sd]?)\s+to\s+(?:be|equal|reach))\b"
)
_PART = r"(?:half|thirds?|quarters?|fourths?|fifths?|sixths?|sevenths?|eighths?|ninths?|tenths?)"
_FUNCTION = (
    r"(?:square|cube|(?:square\s+|cube\s+)?root|reciprocal|inverse|opposite|negative|negation|double|triple|"
    r"factorial|successor|predecessor)"
)
_MULTIPLIED = (
    rf"\b(?:{_PART}\s+of|(?:the|a|an)\s+{_FUNCTION}\s+of"
    r"|(?:multiples?|square\s+root|log(?:arithm)?)\s+of|divisible\s+by|\d\s+over|twice|thrice|doubled?|tripled?|quadruple"
    r"|(?:\d|two|three|four|five|six|seven|eight|nine|ten)\s+times)"
)
_OBJECT = re.compile(rf"(?:{_NOT}|{_EXCEPT}|{_MULTIPLIED})(?:\s+{_FILLER})*[\s$*({{\\\[]*$", re.IGNORECASE)
# These verbs deny a bare number, as in "this rules out 5". With a noun, it is a count: "it rejects 5 items".
_DROPS = re.compile(
    r"\b(?:(?:rul(?:e|es|ed|ing)|cross(?:es|ed|ing)?)\s+out"
    r"|(?:exclud|eliminat|discard|dismiss|reject|disprov|refut|contradict)(?:e|es|ed|ing|s)?)"
    rf"(?:\s+{_FILLER})*[\s$*]*$",
    re.IGNORECASE,
)
_WORD = re.compile("[A-Za-z]")
_DROPPED = (
    r"(?:(?:ruled|crossed|thrown)\s+out|excluded|eliminated|discarded|dismissed|rejected|disproved|refuted)"
)
# A clause that denies what follows it, up to where the next clause starts.
_CLAUSE_END = re.compile(r"[.;:!?,\n]")
_CLAUSE = re.compile(
    r"(?:\b(?:false|wrong|incorrect|untrue|impossible|not\s+true|an?\s+(?:mistake|error))\s+"
    r"(?:that|to\s+(?:answer|assume|believe|claim|conclude|say|think|write))\b"
    r"|\b(?:no\s+way|nobody|no\s+one)\b"
    r"|\b(?:wrong|incorrect|bogus|false|mistaken|erroneous)\s+(?:answer|value|result|solution|choice)\b"
    r"|(?<!no )(?<!any )(?<!without )(?<!beyond )\b(?:doubt|deny|denies|disagree|reject|refute)\b"
    r"|(?:n['’]t|\bnot|\bcannot)\s+(?:accept|believe|claim|conclude|mean|say|think)\b)"
    r"(?:(?!\b(?:but|so|because|since|then|thus|hence|therefore|rather|instead)\b).){0,80}$",
    re.IGNORECASE,
)

# After the answer: "5 is wrong", "5 turned out to be too small", "5 can't be the answer", "5? No."
_WRONG = (
    r"(?:wrong|incorrect|false|untrue|impossible|invalid|mistaken|ruled\s+out|excluded|rejected|too\s+\w+|"
    r"close(?!d)|near|almost|nearly|off|an?\s+(?:mistake|error)|"
    r"what\s+(?!(?:we|I|you|is|was|the\s+(?:question|problem))\b))"
    r"(?:\b|(?<=\s))(?!\s*(?:to|that)\b)"
)
_RIGHT = (
    r"(?:possible|correct|right|true|valid|allowed|permitted|attained|reached|achieved|\w+able|the\s+case|it\b|"
    r"(?:(?:an?|the|my|our|its)\s+)?(?:\w+\s+)?(?:answer|solution|result|value|choice|option)\b)"
)
_IS = (
    r"(?:is|was|are|were|be|seems|looks|"
    r"(?:turn(?:s|ed)|comes?|came)\s+out(?:\s+to\s+be)?|prove[sd]?(?:\s+to\s+be)?)"
)
_REFUTED = (
    rf"(?:{_IS}(?:\s+{_ADVERBS})*\s+{_WRONG}"
    r"|(?:(?:is|was|are|were|can|could|will|would|should|must|does|may)\s*(?:not\b|n['’]t\b|never\b)|cannot\b"
    rf"|can['’]t\b|won['’]t\b|never\b)(?:\s+be)?(?:\s+{_ADVERBS})*\s+{_RIGHT}"
    r"|(?:(?:do|does|did|will|would)\s*(?:not\b|n['’]t\b)|cannot\b|can['’]t\b|won['’]t\b)\s+"
    r"(?:work|hold|fit|satisfy|solve|make\s+sense)\b|fail(?:s|ed)\b)"
)
_AFTERWARDS = re.compile(
    r"[^\w.?!\n]*(?:(?!(?:and|because|but|or|since|so|while)\b)[A-Za-z]+,?\s+){0,3}?"
    rf"(?:would\s+|must\s+)?(?:{_REFUTED}|(?:or|and)\s+(?:more|less|fewer|above|below)\b|at\s+(?:least|most)\b)"
    r"|\s*(?:squared|cubed|factorial|or\s+so|-?ish)\b"
    r"|[^\w\n]*(?:(?:but|and|so)\s+)?(?:none|neither)\s+of\s+(?:them|these|those|which)\s+"
    rf"(?:(?:is|are|was|were|can\s+be)\s+{_RIGHT}|(?:work|hold|fit|solve|satisfie)s?\b)"
    rf"|\s*(?:is|was|(?:can|could|may|must|should|has\s+to|is\s+to)\s+be)\s+{_DROPPED}\b"
    r"|[^\w\n]*[.?!\n][^\w]*(?:(?:wait|hmm|actually|oh|but|oops|sorry)\W+)*"
    r"(?:(?:no|wrong|incorrect)(?=\s*(?:[.,;:!?\n]|$))"
    rf"|(?:that|this|it|the\s+answer|(?:that|this)\s+answer)(?:\s+(?:would\s+|must\s+)?{_REFUTED}|['’]s\s+{_WRONG}))",
    re.IGNORECASE,
)

# The answer itself: a bound, or one value of several that depends on a condition.
_MORE = "more|less|greater|fewer|smaller|larger|bigger|higher|lower"
_BOUND = (
    rf"(?:between|at\s+(?:least|most)|(?:not?\s+)?(?:{_MORE})\s+than(?:\s+or\s+equal\s+to)?|up\s+to"
    r"|almost|nearly|(?:well\s+)?(?:above|below|over|under))[\s}$]*"
)
_SIGN = r"(?:[<>]=?|\\(?:[gl]e(?:q|qslant)?|[gl]t)(?![A-Za-z]))"
_NO_VALUE = re.compile(
    rf"[\s${{(\[]*{_SIGN}|\W*(?:text\w*\W*)?(?:{_NOT}|{_EXCEPT}|{_MULTIPLIED}\W+(?:\\\w+\W*)?\d|{_BOUND}[-\d\\])",
    re.IGNORECASE,
)
_ONLY_BOUND = re.compile(_BOUND, re.IGNORECASE)
_BOUNDED = re.compile(rf"(?:{_SIGN}|\b(?:{_MORE})\s+than)[\s$]*$")
_DEPENDS = re.compile(
    r"\b(?:otherwise|unless|or\s+else)\b|[,;]\s*else\b|\belse\W+\d|\\begin\{d?cases\}", re.IGNORECASE
)


def is_denied(prefix: str, answer: str, suffix: str) -> bool:
    """Whether the text around an answer, or the answer itself, says that it isn't the answer or isn't all."""
    prefix = prefix[-NEAR:]
    is_bare = not _WORD.search(answer) or ("\\" in answer and "\n" not in answer)
    return bool(
        is_negated(prefix[-NEAR // 2 :])
        or (is_bare and _DROPS.search(prefix))
        or _CLAUSE.search(_CLAUSE_END.split(prefix)[-1])
        or _NO_VALUE.match(answer)
        or _DEPENDS.search(answer)
        or is_refuted(suffix[:NEAR])
    )


def is_negated(prefix: str) -> bool:
    """Whether a text ends with a negation, or with a factor such as "twice", of what follows it."""
    return _OBJECT.search(prefix) is not None


def is_refuted(suffix: str) -> bool:
    """Whether a text starts by saying that what precedes it is wrong."""
    return _AFTERWARDS.match(suffix) is not None


def is_bounded(prefix: str, sentence: str) -> bool:
    """Whether a number after `prefix` is only bounded, or its sentence states several values."""
    return bool(
        _ONLY_BOUND.fullmatch(prefix) or _BOUNDED.search(prefix[-20:]) or _DEPENDS.search(sentence, 1)
    )
