"""Where code stands in a reply."""

from __future__ import annotations

import pytest

from silva.rewards.fences import find_code

HELD = 'def f():\n    """As:\n\n    ```\n    f()\n    ```\n    """\n    return 1\nprint(f())\n'
REPLIES = {
    "a block": ("```python\na\n```", "a\n"),
    "the last of two": ("```\na()\n```\nor\n```py\nb\n```", "b\n"),
    "the last of two untagged": ("```\na()\n```\nor\n```\nb()\n```", "b()\n"),
    "no fences": ("x = 1\nprint(x)", "x = 1\nprint(x)"),
    "no fences, but in a text": ("x = '''\n```\n'''\nprint(x)", "x = '''\n```\n'''\nprint(x)"),
    "words": ("I cannot do that.", None),
    "nothing": ("", None),
    "another language": ("```cpp\nint a;\n```", None),
    "text before": ("```text\n3 4\n```\nso\n```python\na\n```", "a\n"),
    "JSON before": ('```json\n{"a": 1}\n```\n```python\na\n```', "a\n"),
    "another language before": ("```cpp\nint a;\n```\nin Python:\n```python\na\n```\nDone", "a\n"),
    "another language after": ("```python\na\n```\nin C:\n```cpp\nint a;\n```", "a\n"),
    "text after": ("```python\na\n```\nprints\n```text\n7\n```", "a\n"),
    "an untagged output after": ("```python\na\n```\nOutput:\n```\n7\n```", "a\n"),
    "an untagged formula after": ("```python\na\n```\n```\nd = e + 1\n```", "a\n"),
    "an untagged output before": ("Input:\n```\n1 2\n```\n```python\na\n```", "a\n"),
    "both untagged": ("```\nprint(7)\n```\nOutput:\n```\n7\n```", "print(7)\n"),
    "a shell before": ("```bash\npython a.py\n```\n```python\na\n```", "a\n"),
    "not closed": ("Here:\n```python\na\nb", "a\nb\n"),
    "not closed after another": ("```text\nx\n```\n```python\na", "a\n"),
    "not closed before another": ("```python\nx(\nso\n```python\na\n```", "a\n"),
    "text that is not closed": ("```text\nx\n```python\na\n```", "a\n"),
    "CRLF": ("```python\r\na\r\nb\r\n```\r\n", "a\nb\n"),
    "a title": ('```python title="a.py"\na\n```', "a\n"),
    "a name": ("```python:main.py\na\n```", "a\n"),
    "braces": ("```{python}\na\n```", "a\n"),
    "classes": ("```{.python .numberLines}\na\n```", "a\n"),
    "a version": ("```python3\na\n```", "a\n"),
    "a long version": ("```Python3.11\na\n```", "a\n"),
    "capitals": ("```PYTHON\na\n```", "a\n"),
    "PyPy": ("```pypy3\na\n```", "a\n"),
    "space before the tag": ("```   python   \na\n```", "a\n"),
    "a session is no program": ("```python\na\n```\n```pycon\n>>> a\n```", "a\n"),
    "in a list": ("1. Code:\n\n   ```python\n   if a:\n       b\n   ```\n2. Done", "if a:\n    b\n"),
    "behind the mark of a list": ("- ```python\n  if a:\n      b\n  ```", "if a:\n    b\n"),
    "indented by tabs": ("\t```python\n\tif a:\n\t\tb\n\t```", "if a:\n\tb\n"),
    "indented, with a text that is not": ("  ```python\n  x = '''\ny\n  '''\n  ```", "x = '''\ny\n'''\n"),
    "quoted": ("> ```python\n> if a:\n>     b\n> ```\nDone", "if a:\n    b\n"),
    "behind words": ("The code: ```python\na\n```", "a\n"),
    "behind code in words": ("Use `a`: ```python\na\n```", "a\n"),
    "the end behind code": ("```python\na\nb```\nDone", "a\nb\n"),
    "two ends behind code": ("```python\na```\nor\n```python\nb```", "b\n"),
    "tildes": ("~~~python\na\n~~~", "a\n"),
    "four": ("````python\na\n````", "a\n"),
    "tildes around backticks": ("~~~python\nx = '''\n```\n'''\n~~~", "x = '''\n```\n'''\n"),
    "in Markdown": ("```markdown\n# T\n```python\na\n```\n```", "a\n"),
    "in more Markdown": ("````md\n```python\na\n```\n````", "a\n"),
    "a docstring with fences": (f"```python\n{HELD}```\nIt prints 1.", HELD),
    "a docstring with fences, untagged": (f"```\n{HELD}```\nIt prints 1.", HELD),
    "a docstring with tagged fences": (
        "```python\n" + HELD.replace("```\n    f()", "```python\n    f()") + "```",
        HELD.replace("```\n    f()", "```python\n    f()"),
    ),
    "a docstring with fences, not closed": (f"```python\n{HELD}".rstrip(), HELD),
    "a comment with a fence": ("```python\na\n# ```\nb\n```", "a\n# ```\nb\n"),
    "inline code": ("Use ```x``` and\n```python\na\n```", "a\n"),
    "an escape that is invalid": ("```python\na = '\\d'\n```", "a = '\\d'\n"),
    "no Python": ("```python\na b\n```\nDone", "a b\n"),
    "empty": ("```python\n```", ""),
}  # fmt: skip


@pytest.mark.parametrize("name", REPLIES)
def test_the_code_of_a_reply_is_found(name: str) -> None:
    reply, code = REPLIES[name]
    assert find_code(reply) == code


def test_a_block_that_defines_the_function_goes_before_later_ones() -> None:
    reply = "```python\ndef add(a, b): ...\n```\nUse it:\n```python\nprint(add(1, 2))\n```"
    assert find_code(reply, "add") == "def add(a, b): ...\n"
    assert find_code(reply, "other") == "print(add(1, 2))\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reply", "code"),
    [("`" * 100_000 + "x", None), ("```" + " " * 100_000 + "`", None), ("```\n" * 30_000, ""),
     ("```py\n(\n" * 12_000, "(\n\n"), ("```py\n" + "(" * 100_000, "(" * 100_000 + "\n"),
     ("a```" * 20_000, None), ("```py\n" + "x```\n" * 20_000, "x\n"), ("-" * 100_000, None)],
    ids=range(8),
)  # fmt: skip
def test_the_code_of_a_long_reply_is_found(reply: str, code: str | None) -> None:
    """Each of these would take minutes if time grew with the square of the length."""
    assert find_code(reply) == code
