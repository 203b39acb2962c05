"""What a text looks like: its words, its language, how much of it repeats itself. Pure functions of text.

The language is guessed from the script of the letters and, for Latin script, from frequent short words. That
tells apart the languages of `LANGUAGES` in texts of a few sentences. It knows no others, takes Ukrainian for
Russian and Persian for Arabic, and says nothing of short texts, formulas and code.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Collection

SCRIPTS = {
    "latin": r"A-Za-zÀ-ÖØ-öø-ɏ", "cyrillic": r"Ѐ-ӿ", "greek": r"Ͱ-Ͽ", "arabic": r"؀-ۿ", "hebrew": r"֐-׿",
    "devanagari": r"ऀ-ॿ", "thai": r"฀-๿", "hangul": r"가-힯", "kana": r"぀-ヿ", "han": r"㐀-鿿",
}  # fmt: skip
LANGUAGES = {
    "ru": {"cyrillic"}, "el": {"greek"}, "ar": {"arabic"}, "he": {"hebrew"}, "hi": {"devanagari"},
    "th": {"thai"}, "ko": {"hangul"}, "ja": {"kana", "han"}, "zh": {"han"},
    **{language: {"latin"} for language in ("en", "de", "fr", "es", "it", "pt", "nl")},
}  # fmt: skip
"""The scripts that each language is written in."""
FREQUENT = {
    "en": "the and of to is that it was for are with this have from you not",
    "de": "der die und das ist nicht ein eine zu den mit sich auf dem von wir",
    "fr": "le les et des est une dans que pour pas qui du sur avec nous cette",
    "es": "el los y las es una que por con para del se lo como pero más",
    "it": "il di che è una per non con della sono gli questo anche nel più come",
    "pt": "o os e as é uma que não para com do da em mas você isso",
    "nl": "de het een en van is dat niet op te zijn met voor aan deze wij",
}
_FREQUENT = {language: frozenset(words.split()) for language, words in FREQUENT.items()}
_LETTERS = {name: re.compile(f"[{letters}]") for name, letters in SCRIPTS.items()}
_ALONE = SCRIPTS["han"] + SCRIPTS["kana"] + SCRIPTS["thai"]  # written without spaces
_WORD = re.compile(rf"[{_ALONE}]|[^\W{_ALONE}]+")
_ESCAPE, _UNICODE_ESCAPE = re.compile(r"\\[nrt]"), re.compile(r"\\u([0-9a-fA-F]{4})")
FEW_LETTERS, FEW_WORDS = 10, 30
FOREIGN = 0.1
"""A larger share of letters in other scripts is another language in between."""


def words(text: str) -> list[str]:
    """In lower case and in one form of Unicode (NFKC), without punctuation; each character of Chinese,
    Japanese and Thai is one."""
    return _WORD.findall(unicodedata.normalize("NFKC", text).casefold())


def bare_words(text: str) -> list[str]:
    """Words as they were before they were _emphasised_, or written as JSON, as calls and results are."""
    plain = _UNICODE_ESCAPE.sub(lambda found: chr(int(found[1], 16)), _ESCAPE.sub(" ", text))
    return [bare for word in words(plain) if (bare := word.strip("_"))]


def ngrams(tokens: list[str], n: int) -> list[tuple[str, ...]]:
    return [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]


def language_of(text: str) -> str:
    """A key of `LANGUAGES`, or "" if the text does not say."""
    letters = {name: len(pattern.findall(text)) for name, pattern in _LETTERS.items()}
    if sum(letters.values()) < FEW_LETTERS:
        return ""
    script = max(letters, key=lambda name: letters[name])
    if letters["kana"] > FOREIGN * letters["han"] and script in ("han", "kana"):
        return "ja"
    if script != "latin":
        return next(language for language, scripts in LANGUAGES.items() if scripts == {script})
    found = Counter(language for word in words(text) for language, own in _FREQUENT.items() if word in own)
    (best, hits), (_, second) = [*found.most_common(2), ("", 0), ("", 0)][:2]
    return best if hits >= 3 and hits > second else ""


def foreign(text: str, languages: Collection[str]) -> bool:
    """Whether a text is in none of the languages, or mixes them with others.

    A text whose language is not known is not foreign, unless its letters are.
    """
    letters = {name: len(pattern.findall(text)) for name, pattern in _LETTERS.items()}
    ours = {script for language in languages for script in LANGUAGES[language]}
    others = sum(count for name, count in letters.items() if name not in ours)
    if others > FOREIGN * sum(letters.values()):
        return True
    found = language_of(text)
    return bool(found) and found not in languages


def repetition(text: str, n: int = 5) -> float:
    """Share of the words that stand in a sequence of `n` words which occurs more than once.

    The repeated n-grams of MassiveText (arXiv:2112.11446, table A1), in words instead of characters. 0 for
    texts of fewer than 30 words.
    """
    tokens = words(text)
    if len(tokens) < FEW_WORDS:
        return 0.0
    grams = ngrams(tokens, n)
    counts = Counter(grams)
    inside = {i + k for i, gram in enumerate(grams) if counts[gram] > 1 for k in range(n)}
    return len(inside) / len(tokens)
