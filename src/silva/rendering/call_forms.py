"""How families of models write calls: a `CallForm` for each, found from the chat template or named in
`rendering.tools`.

A form finds its calls in a reply. What it cannot read becomes an error in words for the model, and it never
raises on what a model wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from silva.rendering import bare_calls as bare
from silva.rendering import marked_calls as marked
from silva.rendering.tool_calls import (
    CLOSE,
    HERMES,
    OPEN,
    Found,
    Parsed,
    describe_tags,
    parsed,
    scan_hermes,
    scan_tags,
    schemas,
    write_calls,
    write_tags,
)
from silva.types import ToolCall, ToolSpec


@dataclass(frozen=True, slots=True)
class CallForm:
    """A way to write calls.

    Attributes:
        scan: what of a text is a call, a broken one, or markup around calls.
        write: calls as a model of this family writes them.
        example: a call, for people and models to read.
        markers: tokens that are part of calls, although they may be control tokens.
        marks: what begins a call, beside `markers` and the tags of tools.
        whole: a reply that begins with this character may be a call as a whole.
        between: what stands between a text and calls after it.
        call_id: of the n-th call of a reply, for templates that show ids. Mistral wants nine characters.
    """

    scan: Callable[[str, Sequence[ToolSpec]], list[Found]]
    write: Callable[[Sequence[ToolCall]], str]
    example: str
    markers: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()
    whole: str = ""
    between: str = "\n"
    call_id: Callable[[str, int], str] = bare.short_id

    def parse(self, text: str, tools: Sequence[ToolSpec] = ()) -> Parsed:
        return parsed(text, self.scan(text, tools))

    def describe(self, tools: Sequence[ToolSpec]) -> str:
        """For the system message, where the chat template does not describe tools in this form."""
        if self is FORMS["tags"]:
            return describe_tags(tools)
        return (
            f"You can call these tools, given by their JSON schemas:\n<tools>\n{schemas(tools)}\n</tools>\n\n"
            f"To call one, write its name and its arguments in this form:\n{self.example}\n"
            "You may write several calls; their results come back to you."
        )


def foreign(text: str, tools: Sequence[ToolSpec], form: str) -> str:
    """What to tell a model whose reply is nothing but a call in another form; empty for other replies."""
    if not tools or not text.strip():
        return ""
    names, found = {tool.name for tool in tools}, dict[str, Parsed]()
    for name, other in FORMS.items():
        read = other.parse(text, tools)
        if name != form and (read.calls or read.errors) and not read.content:
            found[name] = read
    best = max(found, key=lambda name: len(found[name].calls), default=None)
    if best is None or not {call.name for call in found[best].calls} <= names:
        return ""
    return f"this is a call in the form {best}, which is not read here; expected {FORMS[form].example}"


FORMS: dict[str, CallForm] = {
    "hermes": CallForm(scan_hermes, write_calls, HERMES, marks=(OPEN, CLOSE)),
    "tags": CallForm(scan_tags, write_tags, "<name>input</name>"),
    "qwen_xml": CallForm(marked.scan_xml, marked.write_xml, marked.XML, marks=(OPEN, CLOSE, "<function=")),
    "glm": CallForm(marked.scan_glm, marked.write_glm, marked.GLM, marks=(OPEN, CLOSE)),
    "llama": CallForm(
        bare.scan_llama, bare.write_llama, bare.LLAMA, (bare.TAG,), whole="{", between=bare.TAG
    ),
    "mistral": CallForm(
        bare.scan_mistral, bare.write_mistral, bare.MISTRAL, ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
        between="",
    ),
    "deepseek": CallForm(
        marked.scan_deepseek, marked.write_deepseek, marked.DEEPSEEK,
        ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>",
         "<｜tool▁calls▁end｜>"),
    ),
    "kimi": CallForm(
        marked.scan_kimi, marked.write_kimi, marked.KIMI,
        ("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>",
         "<|tool_call_end|>", "<|tool_calls_section_end|>"),
        call_id=marked.kimi_id,
    ),
    "pythonic": CallForm(
        bare.scan_pythonic, bare.write_pythonic, bare.PYTHONIC, (bare.TAG, bare.START, "<|tool_call_end|>"),
        whole="[", between=bare.START,
    ),
}  # fmt: skip
MARKERS = frozenset(marker for form in FORMS.values() for marker in form.markers)
