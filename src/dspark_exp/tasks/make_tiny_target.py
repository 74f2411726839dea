"""Recipe: rebuild the embedded target (tokenizer, chat template, weights) from the synthetic language alone.

In: sizes and steps. Out: a Hugging Face directory and its held-out perplexity beside the language's own entropy.
"""

from __future__ import annotations

import json
import logging
import math
from collections import defaultdict
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from dspark_exp.data.language import BENCHMARKS, Sample, sample, samples
from dspark_exp.data.rendering import Row, render_conversation
from dspark_exp.errors import ConfigError
from dspark_exp.schema import ExperimentConfig
from dspark_exp.training.language_model import CausalLanguageModel

log = logging.getLogger(__name__)
_SPECIALS = ("<|pad|>", "<|end|>", "<|mask|>", "<|system|>", "<|user|>", "<|assistant|>")
_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


@dataclass(frozen=True)
class TinyTargetConfig:
    """Sizes and budget. ``num_steps`` optimizer steps of ``batch_size`` conversations each."""

    vocab_size: int = 1024
    hidden_size: int = 128
    num_layers: int = 6
    num_heads: int = 4
    num_kv_heads: int = 2
    intermediate_size: int = 320
    num_steps: int = 1800
    batch_size: int = 64
    lr: float = 4e-3
    num_heldout_per_benchmark: int = 100
    precision: str = "32-true"
    seed: int = 0


class _Conversations(Dataset[Row]):
    """Endless training conversations: item i is always the same sample."""

    def __init__(self, tokenizer: Any, length: int) -> None:
        self._tokenizer, self._length = tokenizer, length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Row:
        name = list(BENCHMARKS)[index % len(BENCHMARKS)]
        return _render(self._tokenizer, sample(name, "train", index // len(BENCHMARKS)))


def make_tiny_target(config: TinyTargetConfig, out: Path, report_dir: Path | None = None) -> dict[str, Any]:
    """Train tokenizer and model, save both under ``out`` and return (and write) the perplexity report."""
    L.seed_everything(config.seed)
    tokenizer = train_tokenizer(config.vocab_size)
    model: Any = Qwen3ForCausalLM(_model_config(config, tokenizer))
    dataset = _Conversations(tokenizer, config.num_steps * config.batch_size)
    loader: DataLoader[Any] = DataLoader(
        dataset,
        batch_size=config.batch_size,
        collate_fn=partial(_collate, pad_id=tokenizer.pad_token_id),
        num_workers=1,
    )
    trainer = L.Trainer(
        max_steps=config.num_steps,
        precision=config.precision,  # type: ignore[arg-type]
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        log_every_n_steps=20,
    )
    trainer.fit(CausalLanguageModel(model, config.lr, config.num_steps), loader)
    model.to(dtype=torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)
    report = perplexity_report(model.float().eval(), tokenizer, config.num_heldout_per_benchmark)
    (out / "training_report.json").write_text(json.dumps(report, indent=2) + "\n")
    if report_dir is not None:
        report_dir.mkdir(parents=True, exist_ok=True)
        (report_dir / "report.md").write_text(_as_markdown(report))
        (report_dir / "results.json").write_text(json.dumps(report, indent=2) + "\n")
    return report


def train_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE over the language, digits one by one, with a chat template that marks generated spans."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(_SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((f"{s.prompt}\n{s.answer}" for s in samples("train", 1500)), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        eos_token="<|end|>",
        mask_token="<|mask|>",
        chat_template=_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def perplexity_report(model: Qwen3ForCausalLM, tokenizer: Any, num_per_benchmark: int) -> dict[str, Any]:
    """Held-out nats per answer token by domain: the model's, and the language's own entropy."""
    nats: dict[str, float] = defaultdict(float)
    floor: dict[str, float] = defaultdict(float)
    tokens: dict[str, int] = defaultdict(int)
    device = next(model.parameters()).device
    for item in samples("validation", num_per_benchmark):
        row = _render(tokenizer, item)
        ids = torch.tensor([row.input_ids], device=device)
        with torch.no_grad():
            log_probs = model(ids).logits.float().log_softmax(-1)[0, :-1].gather(-1, ids[0, 1:, None])[:, 0]
        live = torch.tensor(row.supervised[1:], device=device)
        nats[item.domain] -= float(log_probs[live].sum())
        floor[item.domain] += item.answer_nats
        tokens[item.domain] += int(live.sum())
    domains = {
        domain: {
            "perplexity": math.exp(nats[domain] / tokens[domain]),
            "language_perplexity": math.exp(floor[domain] / tokens[domain]),
            "nats_per_token": nats[domain] / tokens[domain],
            "language_nats_per_token": floor[domain] / tokens[domain],
            "tokens": tokens[domain],
        }
        for domain in nats
    }
    return {"num_parameters": model.num_parameters(), "vocab_size": len(tokenizer), "domains": domains}


def _model_config(config: TinyTargetConfig, tokenizer: Any) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=config.hidden_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.hidden_size // config.num_heads,
        intermediate_size=config.intermediate_size,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        bos_token_id=None,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        initializer_range=0.05,
    )


def _render(tokenizer: Any, item: Sample) -> Row:
    messages = [{"role": "user", "content": item.prompt}, {"role": "assistant", "content": item.answer}]
    stop = {tokenizer.eos_token_id}
    (row,) = render_conversation(tokenizer, messages, stop, domain=item.domain, source=item.benchmark)
    return row


def _collate(rows: list[Row], pad_id: int) -> dict[str, Tensor]:
    length = max(len(row.input_ids) for row in rows)
    ids = torch.full((len(rows), length), pad_id)
    supervised = torch.zeros(len(rows), length, dtype=torch.bool)
    attention = torch.zeros(len(rows), length, dtype=torch.long)
    for index, row in enumerate(rows):
        ids[index, : len(row.input_ids)] = torch.tensor(row.input_ids)
        supervised[index, : len(row.input_ids)] = torch.tensor(row.supervised)
        attention[index, : len(row.input_ids)] = 1
    return {"input_ids": ids, "supervised": supervised, "attention_mask": attention}


def _as_markdown(report: dict[str, Any]) -> str:
    lines = [
        "# The embedded target `tiny`",
        "",
        f"{report['num_parameters']:,} parameters, {report['vocab_size']} tokens. Held-out answers, by domain:",
        "",
        "| domain | perplexity | of the language itself | nats per token | of the language | answer tokens |",
        "|---|---|---|---|---|---|",
    ]
    for domain, row in report["domains"].items():
        lines.append(
            f"| {domain} | {row['perplexity']:.3f} | {row['language_perplexity']:.3f} | {row['nats_per_token']:.4f} "
            f"| {row['language_nats_per_token']:.4f} | {row['tokens']:,} |"
        )
    lines += [
        "",
        "The language's own figure is exact: the generator knows the probability of each answer it writes.",
        "",
    ]
    return "\n".join(lines)


def run_make_tiny_target(config: ExperimentConfig) -> None:
    """The task: rebuild the embedded target and report how well it knows its language.

    Raises:
        ConfigError: an option that TinyTargetConfig does not know.
    """
    settings = dict(config.tiny_target)
    out = Path(settings.pop("out", Path(config.paths.outputs, "tiny_target")))
    unknown = set(settings) - {f.name for f in fields(TinyTargetConfig)}
    if unknown:
        raise ConfigError(
            f"Unknown option tiny_target.{sorted(unknown)[0]}; see conf/experiment/make_tiny_target.yaml."
        )
    report_dir = Path(config.paths.reports, "make_tiny_target", "tiny")
    make_tiny_target(TinyTargetConfig(**settings), out, report_dir)
    print((report_dir / "report.md").read_text())
