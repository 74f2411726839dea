"""What the target saw and produced is what is trained: templates that think, rewrite history, open a turn oddly."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from dspark_exp.data.rendering import Turn, render_conversation, render_prompt, rows_of_turns
from dspark_exp.targets import Target, turn_end_id

# the parts of Qwen3's template that matter: reasoning is shown in the last turn alone, and the generation prompt of
# non-thinking mode already holds an empty think block
QWEN3_LIKE = """
{%- for m in messages %}
{%- if m.role == 'assistant' %}
  {%- set content = m.content %}{%- set reasoning = m.reasoning_content or '' %}
  {%- if '</think>' in content %}
    {%- set reasoning = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
    {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
  {%- endif %}
  {{- '<|assistant|>' }}
  {%- if loop.last %}{{- '<think>\\n' + reasoning + '\\n</think>\\n\\n' }}{%- endif %}
  {{- content + '<|end|>' }}
{%- else %}{{- '<|' + m.role + '|>' + m.content + '<|end|>' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
  {{- '<|assistant|>' }}
  {%- if not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}
  {%- elif opens_thinking %}{{- '<think>\\n' }}{%- endif %}
{%- endif %}
"""


@pytest.fixture
def qwen_like(tiny: Target) -> Any:
    tokenizer = copy.deepcopy(tiny.tokenizer)
    tokenizer.chat_template = QWEN3_LIKE
    return tokenizer


def _turns(*contents: str) -> list[dict[str, str]]:
    return [{"role": "user" if i % 2 == 0 else "assistant", "content": c} for i, c in enumerate(contents)]


def _learned(tokenizer: Any, row: Any) -> str:
    return tokenizer.decode([t for t, s in zip(row.input_ids, row.supervised, strict=True) if s])


def test_an_empty_think_block_that_the_template_inserts_is_not_learned(qwen_like: Any, tiny: Target) -> None:
    rows = render_conversation(qwen_like, _turns("hi", "of course", "more", "no problem"), tiny.facts.stop_ids)
    # history loses its think block, so the second turn was seen by the target in another form: a row of its own
    assert [_learned(qwen_like, row) for row in rows] == ["of course<|end|>", "no problem<|end|>"]
    for row, messages in zip(rows, (_turns("hi"), _turns("hi", "of course", "more")), strict=True):
        prompt = render_prompt(qwen_like, messages)
        assert row.input_ids[: len(prompt)] == prompt
        assert "<think>\n\n</think>" in qwen_like.decode(prompt[-20:])


def test_thinking_of_every_turn_is_learned_as_it_was_generated(qwen_like: Any, tiny: Target) -> None:
    messages = _turns("hi", "<think>\na\n</think>\n\nof course", "more", "<think>\nb\n</think>\n\nno problem")
    rows = render_conversation(qwen_like, messages, tiny.facts.stop_ids, thinking=True)
    learned = [_learned(qwen_like, row) for row in rows]
    assert learned == ["<think>\na\n</think>\n\nof course<|end|>", "<think>\nb\n</think>\n\nno problem<|end|>"]
    second_prompt = qwen_like.decode(rows[1].input_ids[: rows[1].prompt_length])
    assert "</think>" not in second_prompt  # the official template strips reasoning from history


def test_a_reasoning_field_is_rendered_like_reasoning_in_the_text(qwen_like: Any, tiny: Target) -> None:
    inline = _turns("hi", "<think>\na\n</think>\n\nof course")
    apart = [inline[0], {"role": "assistant", "content": "of course", "reasoning_content": "a"}]
    rows = [render_conversation(qwen_like, m, tiny.facts.stop_ids, thinking=True)[0] for m in (inline, apart)]
    assert rows[0] == rows[1]


def test_a_completion_with_a_closing_tag_alone_gets_no_second_block(qwen_like: Any, tiny: Target) -> None:
    qwen_like.chat_template = QWEN3_LIKE.replace("elif opens_thinking", "else")
    (row,) = render_conversation(
        qwen_like, _turns("hi", "a\n</think>\n\nof course"), tiny.facts.stop_ids, thinking=True
    )
    text = qwen_like.decode(row.input_ids)
    assert text.count("<think>") == text.count("</think>") == 1
    assert _learned(qwen_like, row) == "a\n</think>\n\nof course<|end|>"  # the opening tag belongs to the prompt


def test_a_system_prompt_is_seen_and_not_learned(tiny: Target) -> None:
    messages = [{"role": "system", "content": "be kind"}, *_turns("hi", "of course")]
    (row,) = render_conversation(tiny.tokenizer, messages, tiny.facts.stop_ids)
    assert "be kind" in tiny.tokenizer.decode(row.input_ids)
    assert _learned(tiny.tokenizer, row) == "of course<|end|>"


def test_a_template_without_generation_marks_still_gives_exact_spans(qwen_like: Any, tiny: Target) -> None:
    # such a template gives an all-zero (or all-one) assistant mask when asked for one; spans come from prompts instead
    assert "generation" not in qwen_like.chat_template.replace("add_generation_prompt", "")
    (row,) = render_conversation(qwen_like, _turns("hi", "of course"), tiny.facts.stop_ids)
    assert 0 < sum(row.supervised) < len(row.supervised)


def test_turns_share_a_row_only_while_the_prompt_continues_it() -> None:
    joined = rows_of_turns([Turn([1, 2], [3, 9]), Turn([1, 2, 3, 9, 4], [5, 9])])
    assert [row.input_ids for row in joined] == [[1, 2, 3, 9, 4, 5, 9]]
    assert joined[0].supervised == [False, False, True, True, False, True, True]
    assert joined[0].prompt_length == 2
    apart = rows_of_turns([Turn([1, 2], [3, 9]), Turn([1, 2, 4], [5], finished=False)])
    assert [row.input_ids for row in apart] == [[1, 2, 3, 9], [1, 2, 4, 5]]
    assert [row.finished for row in apart] == [True, False]


def test_a_turn_end_that_no_config_declares_is_found_in_the_template(tiny: Target) -> None:
    tokenizer = copy.deepcopy(tiny.tokenizer)
    end = tokenizer.pad_token
    tokenizer.chat_template = QWEN3_LIKE.replace("<|end|>", end)
    assert turn_end_id(tokenizer) == tokenizer.pad_token_id
    tokenizer.chat_template = "{%- for m in messages %}{{- m.content }}{%- endfor %}"
    assert turn_end_id(tokenizer) is None
