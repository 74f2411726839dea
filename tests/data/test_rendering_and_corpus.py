"""Supervision by token id: exactly what the target produced is learned, and bad rows are counted, never fatal."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_exp.data.anchors import draw_anchors
from dspark_exp.data.corpus import checked, split_validation, tokenize
from dspark_exp.data.rendering import Row, render_conversation, render_prompt
from dspark_exp.data.sources import Conversation, jsonl_conversations
from dspark_exp.errors import DataError
from dspark_exp.targets import Target


def _turns(*contents: str) -> list[dict[str, str]]:
    return [{"role": "user" if i % 2 == 0 else "assistant", "content": c} for i, c in enumerate(contents)]


def test_every_assistant_turn_and_its_end_are_supervised_and_nothing_else(tiny: Target) -> None:
    (row,) = render_conversation(tiny.tokenizer, _turns("hi", "of course", "more", "no problem"), tiny.facts.stop_ids)
    learned = tiny.tokenizer.decode([t for t, s in zip(row.input_ids, row.supervised, strict=True) if s])
    assert learned == "of course<|end|>no problem<|end|>"


def test_supervision_agrees_with_the_templates_own_generation_marks(tiny: Target) -> None:
    messages = _turns("hi", "of course", "more", "no problem")
    marked = tiny.tokenizer.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    (row,) = render_conversation(tiny.tokenizer, messages, tiny.facts.stop_ids)
    assert [int(s) for s in row.supervised] == marked["assistant_masks"]


def test_a_reply_that_was_cut_has_no_supervised_end(tiny: Target) -> None:
    (row,) = render_conversation(tiny.tokenizer, _turns("hi", "of course"), tiny.facts.stop_ids, finished=False)
    assert row.input_ids[-1] not in tiny.facts.stop_ids
    assert row.supervised[-1]


def test_rendering_continues_the_prompt_that_the_target_saw(tiny: Target) -> None:
    messages = _turns("hi", "of course")
    prompt = render_prompt(tiny.tokenizer, messages[:1])
    (row,) = render_conversation(tiny.tokenizer, messages, tiny.facts.stop_ids)
    assert row.input_ids[: len(prompt)] == prompt
    assert row.prompt_length == len(prompt)


BAD = {
    "no user turn": [{"role": "system", "content": "x"}],
    "no assistant reply": _turns("hi"),
    "empty assistant reply": _turns("hi", " "),
    "turns do not alternate between user and assistant": [*_turns("hi"), *_turns("hi", "yes")],
}


def test_rows_that_cannot_train_are_dropped_and_counted_by_reason(tiny: Target) -> None:
    items = [Conversation(tuple(m)) for m in BAD.values()] + [Conversation(tuple(_turns("hi", "of course")))]
    items += [Conversation(()), Conversation(({"role": "assistant", "content": "first"},))]
    corpus = tokenize(items, tiny.tokenizer, tiny.facts.stop_ids, max_length=64)
    assert len(corpus.rows) == 1
    assert set(BAD) <= set(corpus.dropped)
    assert sum(corpus.dropped.values()) == len(items) - 1


def test_a_prompt_longer_than_the_limit_is_dropped_by_name(tiny: Target) -> None:
    items = [Conversation(tuple(_turns("word " * 50, "yes of course"))), Conversation(tuple(_turns("hi", "of course")))]
    corpus = tokenize(items, tiny.tokenizer, tiny.facts.stop_ids, max_length=20)
    assert corpus.dropped == {"longer than data.max_length before any anchor": 1}


def test_zero_or_full_supervision_refuses_to_train() -> None:
    with pytest.raises(DataError, match="No row is left"):
        checked([], Counter())
    with pytest.raises(DataError, match="Every token"):
        checked([Row([1, 2, 3], [True] * 3)], Counter())


@given(
    supervised=st.lists(st.booleans(), min_size=2, max_size=40),
    block_size=st.integers(1, 9),
    num_anchors=st.integers(1, 12),
    seed=st.integers(0, 99),
)
@settings(max_examples=200, deadline=None)
def test_every_live_slot_predicts_a_supervised_token(
    supervised: list[bool], block_size: int, num_anchors: int, seed: int
) -> None:
    ids = torch.arange(len(supervised))[None] + 100
    marks = torch.tensor([supervised])
    blocks = draw_anchors(ids, marks, num_anchors, block_size, torch.Generator().manual_seed(seed))
    for a in range(blocks.positions.shape[1]):
        t = int(blocks.positions[0, a])
        for k in range(1, block_size + 1):
            inside = all(t + j < len(supervised) and supervised[t + j] for j in range(1, k + 1))
            if blocks.live[0, a, k - 1]:
                assert inside
                assert supervised[t]
                assert int(blocks.labels[0, a, k - 1]) == 100 + t + k
                assert int(blocks.previous[0, a, k - 1]) == 100 + t + k - 1
    allowed = [t for t in range(len(supervised) - 1) if supervised[t] and supervised[t + 1]]
    drawn = [int(p) for p, live in zip(blocks.positions[0], blocks.live[0], strict=True) if live[0]]
    assert len(drawn) == len(set(drawn)) == min(len(allowed), num_anchors)
    assert set(drawn) <= set(allowed)


def test_anchors_near_the_end_of_a_reply_have_fewer_live_slots() -> None:
    # PAINS case 9: prompt 8, reply at 8..39, block 4, anchor 37 -> slots predict 38 and 39 only
    from dspark_exp.data.anchors import blocks_at

    supervised = torch.zeros(1, 44, dtype=torch.bool)
    supervised[0, 8:40] = True
    blocks = blocks_at(torch.arange(44)[None], supervised, torch.tensor([[37]]), torch.ones(1, 1, dtype=torch.bool), 4)
    assert blocks.live[0, 0].tolist() == [True, True, False, False]


def test_validation_is_spread_over_domains() -> None:
    items = [Conversation((), domain=d) for d in "aaaaaaaabbbbbbbbcc"]
    train, held = split_validation(items, 6, seed=0)
    assert Counter(i.domain for i in held) == {"a": 2, "b": 2, "c": 2}
    assert len(train) == 12


def test_a_missing_file_is_named(tmp_path) -> None:
    with pytest.raises(DataError, match=r"nowhere\.jsonl"):
        jsonl_conversations(str(tmp_path / "nowhere.jsonl"))
