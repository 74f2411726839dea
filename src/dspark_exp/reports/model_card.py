"""The README of an exported drafter: what it drafts for, how it was measured, how to serve it. From results alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dspark_exp.reports.tables import macro_averages


def model_card(
    drafter: str, target: str, reader: str, serve: str, results: dict[str, Any] | None, notes: Sequence[str] = ()
) -> str:
    """Markdown with the front matter that model hubs read; without results it says that nothing was measured."""
    front = ["---", f"base_model: {target}", "tags: [speculative-decoding, draft-model]", "---"]
    lines = [
        *front,
        f"# {drafter} for {target}",
        f"A draft model for speculative decoding of `{target}`, written for `{reader}` by dspark_exp. Every convention "
        "(layer ids, block layout, mask id, heads) is spelled out in `export_manifest.json`; `golden.safetensors` "
        "holds two prompts with the tokens and logits that a right reader drafts.",
        *(f"- {note}" for note in notes),
        "## Serving",
        f"```\n{serve}\n```",
        "## Measured",
        _sheet(results) if results is not None else "Not measured: exported without an evaluation.",
    ]
    return "\n\n".join(["\n".join(lines[: len(front)]), *lines[len(front) :]]) + "\n"


def _sheet(results: dict[str, Any]) -> str:
    origin = results["provenance"]
    evaluation, training = origin["evaluation"], results["training"]
    rows = ["| benchmark | domain | tau [95%] | acceptance rate | prompts |", "|---|---|---|---|---|"]
    for row in results["rows"]:
        interval = f"{row['tau']:.2f} [{row['tau_low']:.2f}, {row['tau_high']:.2f}]"
        cells = (row["benchmark"], row["domain"], interval, f"{row['acceptance_rate']:.3f}", str(row["prompts"]))
        rows.append("| " + " | ".join(cells) + " |")
    means = ", ".join(f"{name} {average.tau:.2f}" for name, average in macro_averages(results["rows"]).items())
    return "\n\n".join(
        [
            "\n".join(rows),
            f"Macro-averages of tau: {means}. tau = emitted tokens / rounds, the target's own token included.",
            f"Temperature {evaluation['sampling']['temperature']:g}, at most {evaluation['max_new_tokens']} new "
            f"tokens, seed {evaluation['seed']}; trained for {training['steps']} steps; target revision "
            f"{origin['target']['revision']} in {origin['target']['dtype']}; code "
            f"{origin['code']['revision'] or origin['code']['version']}.",
        ]
    )
