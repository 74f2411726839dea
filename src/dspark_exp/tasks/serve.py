"""Recipe: serve a trained drafter behind an OpenAI-compatible HTTP front."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import uvicorn

from dspark_exp.data.rendering import render_prompt
from dspark_exp.decoding import check_policy
from dspark_exp.serving import Engine
from dspark_exp.serving.http import Front
from dspark_exp.serving.openai import Prompting
from dspark_exp.tasks.building import build_batch, build_early_exit, build_policy, build_sampling, open_target
from dspark_exp.tasks.train_eval import Job
from dspark_exp.tasks.trained import trained_drafter

log = logging.getLogger(__name__)


def run_serve(job: Job) -> None:
    """Serve until interrupted."""
    config, wanted = job.config, job.config.serving
    front = build_front(job)
    front.engine.start()
    log.info(
        "%s with %s at http://%s:%d/v1 (policy %s)",
        config.target.name, config.drafter.name, wanted.host, wanted.port, config.policy["_target_"].rsplit(".", 1)[-1],
    )  # fmt: skip
    try:
        uvicorn.run(front.app(), host=wanted.host, port=wanted.port, log_level="warning")
    finally:
        front.engine.stop()


def build_front(job: Job) -> Front:
    """The engine and its front, not started.

    Raises:
        ConfigError: a policy that the drafter cannot serve.
    """
    config, wanted = job.config, job.config.serving
    target = open_target(config)
    trained = trained_drafter(job, target)
    drafter, policy = trained.drafter, build_policy(config, target)
    check_policy(policy, drafter)
    sampling = build_sampling(config.evaluation.sampling)
    rows, length, early_exit = wanted.max_requests, wanted.max_length, build_early_exit(config)
    batch = build_batch(target, drafter, sampling, policy, rows, length, trained.calibration, early_exit)

    def render(messages: Sequence[dict[str, str]]) -> list[int]:
        return render_prompt(target.tokenizer, messages, config.target.thinking)

    engine = Engine(batch, wanted.max_queue)
    return Front(engine, Prompting(target.tokenizer, render, sampling, engine.room), config.target.name)
