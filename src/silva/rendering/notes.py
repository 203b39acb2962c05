"""What a chat template does not allow, in words for people."""

from __future__ import annotations

from silva.rendering.template import Features


def limits(has: Features) -> list[str]:
    notes = []
    if not has.system:
        notes.append(
            "The chat template shows no system message: it is sent as part of the first user message."
        )
    elif not has.later_system:
        notes.append(
            "The chat template shows system messages only at the start: later ones are sent as user."
        )
    if has.alternates:
        notes.append(
            "The chat template refuses two user messages in a row: they are joined, also across results."
        )
    if has.clock:
        notes.append("The chat template prints the date: pinned, so that a run can be repeated.")
    return notes


def tool_limits(has: Features, form: str, result: str | None) -> list[str]:
    """Args:
    form: how calls are written.
    result: how results are shown inside the reply; None if they are not.
    """
    notes = []
    if result is not None:
        notes.append("Results of tools follow their call in the same reply (rendering.result).")
    elif not has.tool_role:
        notes.append("The chat template does not know tool results: sent as user, inside <tool_response>.")
    if not has.tools:
        notes.append("The chat template does not describe tools: the system message describes them.")
    elif has.form != form:
        wanted = f"it writes calls in the form {has.form}" if has.form else "it writes calls in no known form"
        notes.append(
            f"The chat template's own tools are not used ({wanted}, rendering.tools asks for {form}): the "
            "system message describes them."
        )
    return notes
