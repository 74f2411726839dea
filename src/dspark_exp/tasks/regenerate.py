"""Recipe: let the target answer prompts, turn by turn, into a file that survives a crash.

A record is one turn of one conversation, with its token ids as generated. The manifest beside the file says what made
it; going on with other settings is refused by naming them. Ranks of a job answer different prompts, each into a part
file of its own, and the parts join after every turn.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.progress import Progress

from dspark_exp.data.completion_server import CompletionServer, OnReply, Reply, ServerSettings
from dspark_exp.data.manifest import check_manifest
from dspark_exp.data.rendering import Message, Row, Turn, render_prompt, rows_of_turns
from dspark_exp.data.sources import Conversation
from dspark_exp.decoding import Generation, Request
from dspark_exp.launch import barrier, num_ranks, rank, share
from dspark_exp.schema import ExperimentConfig
from dspark_exp.targets import Target, turn_end_id
from dspark_exp.tasks.building import build_loop, build_sampling

log = logging.getLogger(__name__)
Generate = Callable[[Sequence[tuple[int, list[int]]], OnReply], None]
_TURN_SEED = 1_000_003


def regenerate(
    config: ExperimentConfig,
    target: Target,
    conversations: Sequence[Conversation],
    path: Path,
    manifest: dict[str, Any],
) -> tuple[list[Row], Counter[str]]:
    """Rows of every conversation, replies by the target, and what was dropped.

    Raises:
        DataError: the file was made with other settings, or a server keeps failing.
    """
    if rank() == 0:
        check_manifest(path.with_suffix(".manifest.json"), manifest, "data.responses")
        _join_parts(path)
    barrier()
    done = _read_done(path)
    generate = _generator(config, target)
    turn = 0
    while todo := _next_turns(conversations, done, turn, target.tokenizer):
        missing = [(index, messages) for index, messages in todo if (index, turn) not in done]
        if missing:
            log.info("Regenerating %d of %d replies with %s", len(missing), len(todo), target.facts.name)
        prompts = [(i, render_prompt(target.tokenizer, m, config.target.thinking)) for i, m in missing]
        _answer(generate, prompts, turn, conversations, path, done)
        turn += 1
    return _rows(conversations, done)


def _answer(
    generate: Generate,
    prompts: Sequence[tuple[int, list[int]]],
    turn: int,
    conversations: Sequence[Conversation],
    path: Path,
    done: dict[tuple[int, int], dict[str, Any]],
) -> None:
    """Generate one turn of many conversations; every reply is on disk as soon as it is there."""
    prompts = share(prompts)
    own_path = path if num_ranks() == 1 else path.with_suffix(f".rank{rank()}.jsonl")
    is_quiet = not prompts or rank() > 0
    with own_path.open("a", encoding="utf-8") as stream, Progress(transient=True, disable=is_quiet) as bar:
        task = bar.add_task("regenerating", total=len(prompts))

        def write(position: int, reply: Reply) -> None:
            index, ids = prompts[position]
            done[index, turn] = _record(index, turn, conversations[index], ids, reply)
            stream.write(json.dumps(done[index, turn]) + "\n")
            stream.flush()
            bar.advance(task)

        if prompts:
            generate([(index + turn * _TURN_SEED, ids) for index, ids in prompts], write)
    if num_ranks() > 1:
        barrier()
        if rank() == 0:
            _join_parts(path)
        barrier()
        done |= _read_done(path)


def _read_done(path: Path) -> dict[tuple[int, int], dict[str, Any]]:
    """Records by conversation and turn."""
    return {(record["index"], record.get("turn", 0)): record for record in read_records(path)}


def _join_parts(path: Path) -> None:
    """Append the part files of ranks, a killed job's too. A record that is then there twice is read once."""
    for part in sorted(path.parent.glob(f"{path.stem}.rank*.jsonl")):
        lines = [json.dumps(record) + "\n" for record in read_records(part)]
        read_records(path)  # cuts off a torn end
        with path.open("a", encoding="utf-8") as stream:
            stream.writelines(lines)
        part.unlink()


def read_records(path: Path) -> list[dict[str, Any]]:
    """Whole lines of a response file; a torn last line is cut off, so that appending starts clean."""
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    whole = text[: text.rfind("\n") + 1]
    if len(whole) < len(text):
        log.warning("%s ends in a torn line; it is cut off and generated again", path)
        path.write_text(whole, encoding="utf-8")
    return [json.loads(line) for line in whole.splitlines()]


def _next_turns(
    conversations: Sequence[Conversation],
    done: dict[tuple[int, int], dict[str, Any]],
    turn: int,
    tokenizer: Any,
) -> list[tuple[int, list[Message]]]:
    """Conversations that have a user turn number ``turn`` and whose earlier replies all ended by themselves."""
    found = []
    for index, conversation in enumerate(conversations):
        records = [done.get((index, earlier)) for earlier in range(turn)]
        if any(record is None or record["finish_reason"] != "stop" for record in records):
            continue
        replies = [tokenizer.decode(record["response_ids"][:-1]) for record in records if record is not None]
        messages, seen = [], 0
        for message in conversation.messages:
            messages.append(message)
            if message["role"] == "user":
                if seen == turn:
                    found.append((index, messages))
                    break
                messages.append({"role": "assistant", "content": replies[seen]})
                seen += 1
    return found


def _generator(config: ExperimentConfig, target: Target) -> Generate:
    wanted = config.data
    if wanted.server is not None:
        end = turn_end_id(target.tokenizer) or target.facts.stop_ids[0]
        sampling = {key: value for key, value in vars(config.target.sampling).items() if key != "top_k" or value > 0}
        concurrency = max(1, wanted.server_concurrency // num_ranks())  # the server sees all ranks
        settings = ServerSettings(wanted.server.rstrip("/"), wanted.server_model, concurrency)
        return CompletionServer(
            settings, sampling, wanted.max_new_tokens, target.tokenizer, target.facts.stop_ids, end
        ).generate
    loop = build_loop(target, None, build_sampling(config.target.sampling), wanted.regenerate_batch_size)

    def generate(prompts: Sequence[tuple[int, list[int]]], on_reply: OnReply) -> None:
        def hand_over(position: int, generation: Generation) -> None:
            on_reply(position, Reply(generation.token_ids, generation.finish_reason))

        requests = [Request(ids, wanted.max_new_tokens, seed=seed) for seed, ids in prompts]
        loop.run(requests, on_finished=hand_over)

    return generate


def _record(index: int, turn: int, conversation: Conversation, prompt_ids: list[int], reply: Reply) -> dict[str, Any]:
    return {
        "index": index,
        "turn": turn,
        "domain": conversation.domain,
        "source": conversation.source,
        "prompt_ids": prompt_ids,
        "response_ids": reply.token_ids,
        "finish_reason": reply.finish_reason,
    }


def _rows(
    conversations: Sequence[Conversation], done: dict[tuple[int, int], dict[str, Any]]
) -> tuple[list[Row], Counter[str]]:
    rows: list[Row] = []
    dropped: Counter[str] = Counter()
    for index, conversation in enumerate(conversations):
        turns: list[Turn] = []
        while record := done.get((index, len(turns))):
            is_finished = record["finish_reason"] == "stop"
            if record["finish_reason"] == "refused":
                dropped["the server refused it"] += 1
                break
            if len(record["response_ids"]) <= int(is_finished):
                dropped["empty reply"] += 1
                break
            turns.append(Turn(record["prompt_ids"], record["response_ids"], is_finished))
        rows.extend(rows_of_turns(turns, conversation.domain, conversation.source))
    return rows, dropped
