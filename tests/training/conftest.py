"""A job small enough to train in a test: embedded target, few prompts, few steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from dspark_exp.__main__ import CONF
from dspark_exp.config import resolved_dict, validated
from dspark_exp.tasks.train_eval import Job

SMALL = (
    "data.num_per_benchmark=3", "data.num_validation=3", "data.validation_max_new_tokens=12", "trainer.max_steps=12",
    "trainer.batch_size=4", "trainer.num_anchors=4", "trainer.validate_every_steps=4", "trainer.log_every_steps=2",
    "benchmark.num_prompts=2", "benchmark.max_new_tokens=16", "benchmark.names=[equations,thanks]",
    "evaluation.plain_prompts=1", "tracking=none", "drafter.network.block_size=4",
)  # fmt: skip


@pytest.fixture
def make_job(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Job]:
    """A job from overrides; all jobs of the session share regenerated replies and features."""
    cache = tmp_path_factory.getbasetemp() / "cache"

    def make(*overrides: str, outputs: Path | None = None) -> Job:
        paths = (f"paths.outputs={outputs or tmp_path}", f"paths.cache={cache}", f"paths.reports={tmp_path}/reports")
        with initialize_config_dir(str(CONF), version_base="1.3"):
            composed = compose("config", overrides=[*SMALL, *paths, *overrides])
        return Job(validated(composed), resolved_dict(composed))

    return make
