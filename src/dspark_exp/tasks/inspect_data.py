"""Recipe: look at training data before training on it: what is kept, what is dropped and why, what is learned."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dspark_exp.data.corpus import Corpus
from dspark_exp.data.rendering import Row
from dspark_exp.schema import ExperimentConfig
from dspark_exp.targets import read_tokenizer
from dspark_exp.tasks.building import open_target
from dspark_exp.tasks.prepare_data import conversations_of, corpus_of, corpus_of_given_replies

_NUM_BINS = 8
_BAR_WIDTH = 40


def run_inspect_data(config: ExperimentConfig) -> None:
    """Print tables and rows; write the same numbers to ``<paths.outputs>/inspect_data.json``.

    Given replies need the target's tokenizer alone; missing ones are generated first, as training would.
    """
    train, _held_out, unread = conversations_of(config)
    if all(item.has_reply for item in train):
        tokenizer, stop_ids = read_tokenizer(config.target.path)
        corpus = corpus_of_given_replies(config, tokenizer, stop_ids, train, unread)
    else:
        target = open_target(config)
        tokenizer = target.tokenizer
        corpus, _ = corpus_of(config, target, train, unread)
    console = Console()
    console.print(_kept_table(corpus))
    console.print(_length_table(corpus))
    for row in _spread(corpus.rows, config.inspect.num_rows):
        console.print(_coloured(row, tokenizer))
    console.print(Text.assemble("Shown: ", ("learned", _LEARNED), " and ", ("context", _CONTEXT), "."))
    path = Path(config.paths.outputs) / "inspect_data.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(corpus.summary() | {"lengths": _histogram(corpus)}, indent=1))


_LEARNED, _CONTEXT = "bold green", "dim"


def _kept_table(corpus: Corpus) -> Table:
    summary = corpus.summary()
    total = summary["rows"] + sum(corpus.dropped.values())
    table = Table("rows", "count", "share", title="Training rows")
    for domain, count in summary["rows_by_domain"].items():
        table.add_row(f"kept, {domain}", f"{count:,}", f"{count / total:.1%}", style="green")
    for reason, count in sorted(corpus.dropped.items(), key=lambda item: -item[1]):
        table.add_row(f"dropped: {reason}", f"{count:,}", f"{count / total:.1%}", style="red")
    cut = sum(not row.finished for row in corpus.rows)
    table.add_section()
    table.add_row("kept with a cut reply", f"{cut:,}", f"{cut / total:.1%}")
    share = summary["supervised_tokens"] / summary["tokens"]
    table.add_row("supervised tokens", f"{summary['supervised_tokens']:,}", f"{share:.1%}")
    return table


def _length_table(corpus: Corpus) -> Table:
    table = Table("tokens a row", "rows", "", title="Lengths")
    bins = _histogram(corpus)
    most = max(b["rows"] for b in bins)
    for b in bins:
        bar = "█" * round(_BAR_WIDTH * b["rows"] / most)
        table.add_row(f"{b['from']:,} to {b['to']:,}", f"{b['rows']:,}", bar)
    return table


def _histogram(corpus: Corpus) -> list[dict[str, int]]:
    lengths = [len(row.input_ids) for row in corpus.rows]
    width = max(1, -(-max(lengths) // _NUM_BINS))
    return [
        {
            "from": first,
            "to": first + width - 1,
            "rows": sum(first <= length < first + width for length in lengths),
        }
        for first in range(0, max(lengths) + 1, width)
    ]


def _spread(rows: Sequence[Row], count: int) -> list[Row]:
    """Rows from the whole data set, the first included."""
    step = max(1, len(rows) // count)
    return list(rows[::step])[:count]


def _coloured(row: Row, tokenizer: Any) -> Text:
    """The row as text; runs of equally marked tokens are decoded together, so that no character is torn."""
    text = Text.assemble((f"\n{row.domain} {row.source} ({len(row.input_ids)} tokens)\n", "bold"))
    first = 0
    for index in range(1, len(row.input_ids) + 1):
        if index == len(row.input_ids) or row.supervised[index] != row.supervised[first]:
            style = _LEARNED if row.supervised[first] else _CONTEXT
            text.append(tokenizer.decode(row.input_ids[first:index]), style=style)
            first = index
    return text
