"""What sft.py compares with: right dialogues, rows as the template's own marks say, and paired numbers."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from tests.rendering.templates import byte_tokenizer

from silva.data.dialogues import dialogue, shape_of
from silva.data.row_shapes import Row
from silva.rendering.renderer import Renderer
from silva.rendering.supervised import SupervisedRow, supervised_rows

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "benchmarks")]

import sft  # noqa: E402
from peers.pipe import digest  # noqa: E402

ONE, REWRITTEN = sft.CASES


def rows(case: sft.Case) -> tuple[dict, list[SupervisedRow], Renderer]:
    [said] = sft.dialogues(case, 1)
    renderer = Renderer(byte_tokenizer(case.template), history="template" if case.rewritten else "keep")
    row = Row("row", said)
    return said, supervised_rows(renderer, dialogue(row, shape_of(row))), renderer


def test_masks_are_those_that_transformers_finds_between_the_marks_of_the_template() -> None:
    said, [row], renderer = rows(ONE)
    found = byte_tokenizer(ONE.template).apply_chat_template(
        said["messages"], tools=said["tools"], return_dict=True,
        return_assistant_tokens_mask=True,
    )  # fmt: skip
    count = len(row)
    assert found["input_ids"][:count] == row.tokens.tolist()
    assert [bool(each) for each in found["assistant_masks"][:count]] == row.trained["assistant"].tolist()
    assert renderer.decode(found["input_ids"][count:]) == "\n"


def test_each_reply_has_a_row_if_earlier_thoughts_are_taken_out() -> None:
    _, found, renderer = rows(REWRITTEN)
    texts = [renderer.decode(row.tokens.tolist()) for row in found]
    assert [text.count("<think>") for text in texts] == [1] * 6
    assert [text.count("<|im_start|>assistant") for text in texts] == [*range(1, 7)]


def test_dialogues_have_the_replies_of_their_case_and_right_answers() -> None:
    made = sft.dialogues(ONE, 30)
    replies = [[m for m in said["messages"] if m["role"] == "assistant"] for said in made]
    assert {len(each) for each in replies} == {4, 6, 8}
    for said in made:
        for call, result in zip(said["messages"][2::4], said["messages"][3::4], strict=True):
            function = call["tool_calls"][0]["function"]
            if function["name"] == "calculator":
                a, b = function["arguments"]["expression"].split(" * ")
                assert int(result["content"]) == int(a) * int(b)
            else:
                assert set(json.loads(result["content"])) == {"pieces", "aisle"}


def test_other_tokens_masks_or_order_are_refused() -> None:
    row, other = ([1, 2], [False, True]), ([1, 2], [True, True])
    same = {"digest": digest([row, other])}
    sft.refuse_other_rows("TRL", [same], [{"digest": digest([row, other])}])
    for theirs in ([other, row], [row, row], [row], [([1, 3], row[1]), other]):
        with pytest.raises(SystemExit, match="step 2"):
            sft.refuse_other_rows("TRL", [same, same], [same, {"digest": digest(theirs)}])


def test_ratios_are_medians_of_pairs_without_the_first_and_losses_are_compared_relatively() -> None:
    ours = [{"step": s, "loss": 2.0} for s in (1.0, 1.0, 2.0, 4.0)]
    theirs = [{"step": s, "loss": loss} for s, loss in ((99.0, 2.0), (3.0, 2.5), (4.0, 1.6))]
    assert sft.ratio(ours, theirs, "step") == 2.5
    assert sft.apart(ours, theirs) == pytest.approx([0.0, 0.2, 0.25])
