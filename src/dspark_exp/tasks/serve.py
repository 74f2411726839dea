"""Recipe: serve a trained drafter behind an OpenAI-compatible HTTP front."""

from __future__ import annotations

import logging
import socket
from collections.abc import Sequence
from contextlib import suppress

import uvicorn

from dspark_exp.data.rendering import render_prompt
from dspark_exp.decoding import check_policy
from dspark_exp.errors import ConfigError
from dspark_exp.serving import Engine
from dspark_exp.serving.http import Front
from dspark_exp.serving.openai import Prompting
from dspark_exp.tasks.building import build_batch, build_early_exit, build_policy, build_sampling, open_target
from dspark_exp.tasks.train_eval import Job
from dspark_exp.tasks.trained import trained_drafter

log = logging.getLogger(__name__)
_GRACE_S = 10


def run_serve(job: Job) -> None:
    """Serve until interrupted; answers on their way then have some seconds to end.

    Raises:
        ConfigError: the address cannot be had, said before anything is loaded or trained.
    """
    config, wanted = job.config, job.config.serving
    with _bound(wanted.host, wanted.port) as bound:
        front = build_front(job)
        front.engine.start()
        log.info(
            "%s with %s at http://%s:%d/v1 (policy %s)",
            config.target.name, config.drafter.name, wanted.host, bound.getsockname()[1],
            config.policy["_target_"].rsplit(".", 1)[-1],
        )  # fmt: skip
        settings = uvicorn.Config(front.app(), log_level="warning", timeout_graceful_shutdown=_GRACE_S)
        try:
            with suppress(KeyboardInterrupt):
                uvicorn.Server(settings).run(sockets=[bound])
        finally:
            front.engine.stop()


def _bound(host: str, port: int) -> socket.socket:
    """A socket that holds the address and does not listen yet."""
    found = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((host, port))
    except (OSError, OverflowError) as error:
        found.close()
        raise ConfigError(
            f"serving.host={host} serving.port={port} cannot be had: {error}. Choose another serving.port, or 0 for a "
            "free one."
        ) from error
    return found


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
