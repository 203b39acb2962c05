"""Words, languages and repetition, on texts of which the answer is known."""

from typing import get_args

import pytest

from silva.config.sections import Language
from silva.synthesis.texts import LANGUAGES, foreign, language_of, repetition, words

TEXTS = {
    "en": "The answer is that you have to go to the house with the red door.",
    "de": "Die Antwort ist nicht schwer: wir gehen mit dem Hund zu der Tür.",
    "fr": "La réponse est dans le livre que nous avons avec les images des chats.",
    "es": "La respuesta es que los niños van con el perro para ver las flores.",
    "it": "La risposta è che il cane non va con gli altri per una strada.",
    "pt": "A resposta é que você não vai com os cães para uma casa do lado.",
    "nl": "Het antwoord is dat de hond niet met een bal op het veld van ons is.",
    "ru": "Ответ находится в красном доме.", "el": "Η απάντηση είναι στο κόκκινο σπίτι.",
    "ar": "الجواب في البيت الأحمر", "he": "התשובה נמצאת בבית האדום", "hi": "उत्तर लाल घर में है और वहाँ है",
    "th": "คำตอบอยู่ในบ้านสีแดง", "ko": "정답은 빨간 집에 있습니다 그렇습니다",
    "zh": "答案在红色的房子里面请你去看",
    "ja": "答えは赤い家の中にあります。",
}  # fmt: skip


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_sentence_is_in_its_language(language):
    assert language_of(TEXTS[language]) == language
    assert not foreign(TEXTS[language], [language])
    assert all(
        foreign(TEXTS[language], [other]) for other in LANGUAGES if other not in (language, "ja", "zh")
    )


def test_a_configuration_may_name_each_of_them():
    assert {*get_args(Language)} == {*LANGUAGES}


def test_what_says_nothing_of_its_language_is_not_foreign():
    assert language_of("x = 2 * y + 7") == ""
    assert language_of("the forward and backward pass") == ""  # two frequent words are too few
    assert (
        language_of("le chat, les chiens, des oiseaux: de kat, het paard, een vis") == ""
    )  # as many of each
    assert not foreign("up up left", ["en"]) and not foreign("12 + 30 = 42", ["zh"])


def test_another_language_in_between_is_foreign():
    assert foreign(TEXTS["en"] + "答案在红色的房子里面", ["en"])
    assert not foreign(TEXTS["en"] + "答案在红色的房子里面", ["en", "zh"])


def test_words_are_without_case_and_punctuation():
    assert words("It's 3.5, Sir! 你好 (Ok)") == ["it", "s", "3", "5", "sir", "你", "好", "ok"]


def test_repetition_is_the_share_of_words_in_repeated_sequences():
    once = [f"w{i}" for i in range(40)]
    assert repetition(" ".join(once)) == 0
    assert repetition(" ".join([*once, *once[:10]])) == 20 / 50
    assert repetition("again " * 40) == 1
    assert repetition("again " * 30) == 1 and repetition("again " * 29) == 0
