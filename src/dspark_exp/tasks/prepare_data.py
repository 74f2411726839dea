"""Recipe: prompts -> replies of the target itself -> token rows -> target features, each step stored with provenance.

A step that was done before, for the same target, settings and data, is read back instead. Ranks share the work.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset

from dspark_exp.data.corpus import Corpus, checked, keep_row, split_validation, tokenize
from dspark_exp.data.feature_cache import FeatureCache
from dspark_exp.data.feature_store import DTYPES, StoredRow, TokenRows, build_feature_store
from dspark_exp.data.manifest import check_manifest
from dspark_exp.data.rendering import Message, Row, render_prompt
from dspark_exp.data.sources import (
    Conversation,
    HubConversations,
    Loaded,
    hub_conversations,
    jsonl_conversations,
    language_conversations,
)
from dspark_exp.hashing import short_digest
from dspark_exp.launch import locked_together
from dspark_exp.schema import ExperimentConfig
from dspark_exp.targets import Target, check_target
from dspark_exp.tasks.building import as_settings, open_target
from dspark_exp.tasks.regenerate import regenerate

log = logging.getLogger(__name__)
ComputeFeatures = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
_GB = 1e9


@dataclass(frozen=True)
class PreparedData:
    """Training rows, prompts for validation, and where all of it came from."""

    rows: Dataset[StoredRow]
    validation_prompts: list[tuple[list[int], str]]
    provenance: dict[str, Any]


def prepare_data(config: ExperimentConfig, target: Target) -> PreparedData:
    """Everything that drafter training reads."""
    cache = Path(config.paths.cache)
    cache.mkdir(parents=True, exist_ok=True)
    if target.pace is None:  # a sharded one was checked when it was whole
        check_target(target)
    with locked_together(cache / "prepare.lock"):  # parallel jobs of a sweep wait for the first instead of repeating it
        train, held_out, dropped = conversations_of(config)
        corpus, origin = corpus_of(config, target, train, dropped)
        rows = rows_of(config, target, corpus)
    prompts = [
        (render_prompt(target.tokenizer, _first_prompt(item), config.target.thinking), item.domain) for item in held_out
    ]
    provenance = {**origin, "train": corpus.summary(), "validation_prompts": len(prompts)}
    return PreparedData(rows, prompts, provenance)


def run_prepare_data(config: ExperimentConfig) -> None:
    """``task=prepare_data``: replies and features, without training."""
    data = prepare_data(config, open_target(config))
    summary = data.provenance["train"]
    log.info(
        "Ready: %d rows, %d supervised of %d tokens, features %s; dropped: %s",
        summary["rows"],
        summary["supervised_tokens"],
        summary["tokens"],
        config.features.mode,
        summary["dropped"] or "none",
    )


def conversations_of(config: ExperimentConfig) -> tuple[list[Conversation], list[Conversation], dict[str, int]]:
    """Training and validation conversations, and the rows that were none, by reason."""
    wanted = config.data
    if wanted.source == "language":
        per_benchmark = -(-wanted.num_validation // 9)
        held_out = language_conversations("validation", per_benchmark)[: wanted.num_validation]
        train = language_conversations("train", wanted.num_per_benchmark)
        return train[: wanted.max_rows], held_out, {}
    loaded = _load(config)
    conversations = loaded.conversations
    if wanted.replies == "regenerate":
        conversations = [item.prompts for item in conversations]
    train, held_out = split_validation(conversations, wanted.num_validation, seed=0)
    return train[: wanted.max_rows], held_out, loaded.dropped


def _load(config: ExperimentConfig) -> Loaded:
    wanted = config.data
    if wanted.source == "jsonl":
        assert wanted.path is not None
        return jsonl_conversations(wanted.path)
    source = as_settings(HubConversations, wanted.hub or {}, "data.hub")
    needed = None if wanted.max_rows is None else wanted.max_rows + wanted.num_validation
    return hub_conversations(source, wanted.domains, needed)


def corpus_of_given_replies(
    config: ExperimentConfig,
    tokenizer: Any,
    stop_ids: Collection[int],
    conversations: Sequence[Conversation],
    unread: dict[str, int],
) -> Corpus:
    """Token rows of conversations that bring their replies."""
    wanted = config.data
    thinking = config.target.thinking
    return tokenize(conversations, tokenizer, stop_ids, wanted.max_length, thinking, unread, wanted.max_dropped)


def corpus_of(
    config: ExperimentConfig, target: Target, conversations: Sequence[Conversation], unread: dict[str, int]
) -> tuple[Corpus, dict[str, Any]]:
    """Token rows: given replies are rendered, missing ones are generated by the target."""
    wanted = config.data
    given = [item for item in conversations if item.has_reply]
    prompts = [item for item in conversations if not item.has_reply]
    rows: list[Row] = []
    dropped = Counter(unread)
    origin: dict[str, Any] = {"replies": "given", "path": Path(wanted.path or "").name, **_rendering(config, target)}
    if given:
        corpus = corpus_of_given_replies(config, target.tokenizer, target.facts.stop_ids, given, {})
        rows += corpus.rows
        dropped.update(corpus.dropped)
    if prompts:
        manifest = _replies_manifest(config, target, prompts)
        generated, lost = regenerate(config, target, prompts, _responses_path(config, manifest), manifest)
        dropped.update(lost)
        kept: list[Row] = []
        for row in generated:
            keep_row(row, wanted.max_length, kept, dropped)
        rows += kept
        cut = {"cut_replies": sum(not row.finished for row in kept)}
        origin = {"replies": f"given {len(given)}, others regenerated" if given else "regenerated", **cut, **manifest}
    return checked(rows, dropped, wanted.max_dropped), origin


def _replies_manifest(
    config: ExperimentConfig, target: Target, conversations: Sequence[Conversation]
) -> dict[str, Any]:
    """What decides the replies that are generated."""
    wanted = config.data
    return {
        **target.fingerprint(),
        "sampling": vars(config.target.sampling),
        "max_new_tokens": wanted.max_new_tokens,
        "thinking": config.target.thinking,
        "generator": "local" if wanted.server is None else f"server {wanted.server_model or '(first model)'}",
        "prompts_sha256": short_digest([c.messages for c in conversations]),
    }


def _responses_path(config: ExperimentConfig, manifest: dict[str, Any]) -> Path:
    """``data.responses``, or a file named after its manifest."""
    if config.data.responses is not None:
        return Path(config.data.responses)
    key = short_digest(manifest)
    return Path(config.paths.cache) / "responses" / key / "responses.jsonl"


def _rendering(config: ExperimentConfig, target: Target) -> dict[str, Any]:
    fingerprint = target.fingerprint()
    return {name: fingerprint[name] for name in ("template_sha256", "tokenizer_sha256")} | {
        "thinking": config.target.thinking
    }


def rows_of(config: ExperimentConfig, target: Target, corpus: Corpus) -> Dataset[StoredRow]:
    """The rows with features from the store, or without, to be served batch by batch."""
    wanted = config.features
    if wanted.mode != "stored":
        return TokenRows(corpus.rows)
    facts = target.facts
    return build_feature_store(
        Path(config.paths.cache) / "features",
        corpus.rows,
        target.features,
        _feature_manifest(config, target),
        feature_size=(len(facts.layer_ids) + 1) * facts.hidden_size,
        dtype=wanted.dtype,
        max_gb=wanted.max_gb,
        batch_size=wanted.batch_size or 1,
        device=target.device,
        pad_id=facts.pad_token_id,
        folder=None if wanted.dir is None else Path(wanted.dir),
        on_shard=lambda done, total: log.info("target features: shard %d of %d", done, total),
    )


def compute_of(config: ExperimentConfig, target: Target) -> ComputeFeatures:
    """How a batch without features gets them: by the target, or from what a bounded cache still holds."""
    wanted = config.features
    if wanted.mode != "bounded":
        return target.features
    manifest = _feature_manifest(config, target) | {"feature_dtype": wanted.dtype}
    key = short_digest(manifest)
    folder = Path(wanted.dir) if wanted.dir is not None else Path(config.paths.cache) / "features_bounded" / key
    check_manifest(folder / "manifest.json", manifest, "features.dir")
    cache = FeatureCache(folder, target.features, int(wanted.max_gb * _GB), DTYPES[wanted.dtype])
    if target.pace is None:
        return cache

    def in_step(input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        features = cache(input_ids, attention_mask)
        target.catch_up()  # another rank may have found less in the cache
        return features

    return in_step


def _feature_manifest(config: ExperimentConfig, target: Target) -> dict[str, Any]:
    return {**target.fingerprint(), "max_length": config.data.max_length, "thinking": config.target.thinking}


def _first_prompt(item: Conversation) -> list[Message]:
    """The system message, if any, and the first user turn."""
    messages = list(item.messages)
    first = next((i for i, message in enumerate(messages) if message["role"] == "user"), len(messages) - 1)
    return messages[: first + 1]
