"""Recipe: train one drafter on one target and measure it. Reads top to bottom."""

from __future__ import annotations

import json
import logging
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint, ProgressBar, RichProgressBar
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy

from dspark_exp.calibration import Calibration
from dspark_exp.config import flattened, job_key
from dspark_exp.data.benchmarks import Prompt
from dspark_exp.data.manifest import write_json
from dspark_exp.decoding import check_policy
from dspark_exp.errors import ConfigError
from dspark_exp.hashing import short_digest
from dspark_exp.launch import barrier, num_ranks, rank
from dspark_exp.reports import merged, print_table
from dspark_exp.schema import ExperimentConfig
from dspark_exp.targets import Target
from dspark_exp.tasks.auto_shard import with_shard_chosen
from dspark_exp.tasks.building import (
    build_drafter,
    build_module,
    build_policy,
    devices_of,
    load_benchmarks,
    open_target,
    precision_of,
    ranks_of,
)
from dspark_exp.tasks.calibrate import calibrate, calibration_options
from dspark_exp.tasks.checkpoints import load_drafter, store_calibration
from dspark_exp.tasks.evaluate import Evaluation, draft_rounds, evaluate
from dspark_exp.tasks.prepare_data import ComputeFeatures, PreparedData, compute_of, prepare_data
from dspark_exp.tasks.provenance import provenance
from dspark_exp.tasks.pruning import pruning_of
from dspark_exp.tasks.tracked import datasets_of, files_of, final_metrics, write_environment
from dspark_exp.tracking import JobTracker
from dspark_exp.training import DataWait, DraftDiagnostics, DrafterData, DrafterModule, Optimization

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Job:
    """One drafter of one experiment: where it writes and what identifies it."""

    config: ExperimentConfig
    plain: dict[str, Any]

    @property
    def header(self) -> dict[str, str]:
        """What results begin with, and what an MLflow run is tagged with."""
        config = self.config
        named = config.experiment or "single"
        return {"experiment": named, "target": config.target.name, "drafter": config.drafter.name}

    @property
    def folder(self) -> Path:
        name = f"{self.config.drafter.name}-{job_key(self.plain)}"
        return Path(self.config.paths.outputs, self.header["experiment"], self.config.target.name, name)

    @property
    def results_path(self) -> Path:
        return self.folder / "results.json"


@dataclass(frozen=True)
class Company:
    """What a job has from the jobs that it trains with: their target, its features, and when its turn is."""

    target: Target
    compute_features: ComputeFeatures
    turn: L.Callback


def train_eval(job: Job, company: Company | None = None) -> dict[str, Any]:
    """Train, select by ``val/tau``, evaluate, write ``results.json``. A finished job is read back, not repeated.

    With ``trainer.max_steps=0`` the drafter of ``drafter.init_from`` is evaluated as it is.

    Raises:
        Pruned: a search ended the job early.
    """
    known = finished_results(job)
    if known is not None:
        return known
    _check_ranks(job.config)
    pruning = pruning_of(job.config, job.folder)
    started = time.perf_counter()
    config = with_shard_chosen(job.config)
    target = open_target(config) if company is None else company.target
    drafter = build_drafter(config, target)
    benchmarks = load_benchmarks(config)
    calibration_options(config)
    check_policy(build_policy(config, target), drafter)
    compute_features = compute_of(config, target) if company is None else company.compute_features
    module = _module(config, target, drafter, compute_features)
    prepare_folder(job)
    is_trained = config.trainer.max_steps > 0
    data = prepare_data(config, target) if is_trained else None
    prepared_s = time.perf_counter() - started
    with _tracker(job) as tracker:
        callbacks = [company.turn if company is not None else RichProgressBar(), *([pruning] if pruning else [])]
        training = _as_given(drafter)
        if data is not None:
            training, drafter = _train(job, target, module, data, tracker, callbacks)
        if pruning is not None:
            pruning.end(job.folder, module.learning_curve, rank() == 0)
        calibration = _calibrated(job, target, drafter, training)
        evaluation = evaluate(config, target, drafter, benchmarks, calibration)
        results = _results(job, target, data, training, evaluation, _prompt_hashes(benchmarks))
        results["calibration"] = None if calibration is None else calibration.as_dict()
        results["seconds"] = {**training["seconds"], "prepare": prepared_s, "total": time.perf_counter() - started}
        if rank() == 0:
            (job.folder / "rounds.json").write_text(json.dumps(evaluation.rounds))
            write_json(job.results_path, results)
            write_environment(job.folder)
            tracker.log_results(final_metrics(results), files_of(job.folder), datasets_of(results))
    barrier()
    return results


def prepare_folder(job: Job) -> None:
    """The job's folder with its config, which is also what ranks are handed."""
    job.folder.mkdir(parents=True, exist_ok=True)
    if rank() == 0:
        write_json(job.folder / "config.json", job.plain)


def _check_ranks(config: ExperimentConfig) -> None:
    wanted = ranks_of(config)
    if wanted != num_ranks():
        raise ConfigError(
            f"trainer.devices={config.trainer.devices} on {config.trainer.num_nodes} node(s) needs {wanted} ranks, but "
            f"{num_ranks()} run."
        )


def finished_results(job: Job) -> dict[str, Any] | None:
    """Results of this job, or of the same job of another experiment, whose folder is then linked from this one's."""
    if job.results_path.exists():
        log.info("%s is finished already: %s", job.config.drafter.name, job.results_path)
        return dict(json.loads(job.results_path.read_text()))
    if job.folder.exists():
        return None  # begun here: it goes on from its checkpoint
    for path in Path(job.config.paths.outputs).glob(f"*/{job.config.target.name}/{job.folder.name}/results.json"):
        log.info("%s is finished already, in another experiment: %s", job.config.drafter.name, path)
        results = {**json.loads(path.read_text()), "experiment": job.header["experiment"]}
        job.folder.parent.mkdir(parents=True, exist_ok=True)
        job.folder.symlink_to(os.path.relpath(path.parent, job.folder.parent), target_is_directory=True)
        return results
    return None


def _calibrated(job: Job, target: Target, drafter: Any, training: dict[str, Any]) -> Calibration | None:
    """Fit temperatures and keep them beside the weights they belong to."""
    calibration = calibrate(job.config, target, drafter)
    if calibration is not None and training["checkpoint"] is not None and rank() == 0:
        store_calibration(job.folder / "checkpoints" / training["checkpoint"], calibration)
    return calibration


def show(results: dict[str, Any]) -> None:
    """Print the metric sheet of one job."""
    print_table(merged(results["experiment"], [results], []))


def _tracker(job: Job) -> JobTracker:
    config = job.config
    return JobTracker(
        config.tracking.uri if config.tracking.enabled else "",
        config.tracking.experiment,
        name=job.folder.name,
        folder=job.folder,
        parameters=flattened(job.plain),
        tags=job.header,
    )


def _module(config: ExperimentConfig, target: Target, drafter: Any, compute_features: ComputeFeatures) -> DrafterModule:
    wanted = config.trainer
    optimization = Optimization(
        wanted.lr,
        max(1, wanted.max_steps),
        wanted.warmup_ratio,
        wanted.head_lr_scale,
        wanted.weight_decay,
        wanted.beta2,
        wanted.clip,
    )
    if wanted.compile:
        drafter.compile_training()
    module: DrafterModule = build_module(
        config,
        drafter,
        optimization=optimization,
        compute_features=compute_features,
        draft_loop=lambda network, prompts: draft_rounds(config, target, network, prompts),
        sharded=wanted.strategy == "fsdp" and num_ranks() > 1,
    )
    return module


def _train(
    job: Job,
    target: Target,
    module: DrafterModule,
    prepared: PreparedData,
    tracker: JobTracker,
    callbacks: list[L.Callback],
) -> tuple[dict[str, Any], Any]:
    """What came of training, and the selected drafter."""
    config, wanted = job.config, job.config.trainer
    data = DrafterData(
        prepared.rows,
        prepared.validation_prompts,
        wanted.batch_size,
        wanted.max_steps * wanted.accumulate,
        config.seed,
        target.facts.pad_token_id,
        wanted.num_workers,
    )
    folder = job.folder / "checkpoints"
    best = ModelCheckpoint(folder, "best", monitor="val/tau", mode="max", enable_version_counter=False)
    newest = ModelCheckpoint(folder, "last", enable_version_counter=False)  # after every validation, to resume from
    wait = DataWait()
    callbacks = [best, newest, wait, DraftDiagnostics(module.drafter.block_size), *callbacks]
    trainer = _trainer(job, module, tracker, callbacks)
    started = time.perf_counter()
    last = folder / "last.ckpt"
    trainer.fit(module, data, ckpt_path=last if last.exists() else None, weights_only=True)
    seconds = time.perf_counter() - started
    chosen = Path(best.best_model_path or last)
    drafter = module.whole_drafter()
    selected = load_drafter(chosen, drafter).step
    training = {
        "seconds": {"train": seconds},
        "data_wait_share": wait.share,
        "steps": trainer.global_step,
        "selected_step": selected,
        "checkpoint": chosen.name,
        "learning_curve": module.learning_curve,
        "trainable_parameters": sum(p.numel() for p in module.drafter.parameters() if p.requires_grad),
    }
    return training, drafter


def _trainer(job: Job, module: DrafterModule, tracker: JobTracker, callbacks: list[L.Callback]) -> L.Trainer:
    config, wanted = job.config, job.config.trainer
    return L.Trainer(
        max_steps=wanted.max_steps,
        max_epochs=1,  # one epoch is the whole run: the sampler counts steps
        accumulate_grad_batches=wanted.accumulate,
        precision=precision_of(config),  # type: ignore[arg-type]
        accelerator=wanted.accelerator,
        devices=devices_of(config),
        num_nodes=wanted.num_nodes,
        strategy=_strategy(config, module),
        val_check_interval=min(wanted.validate_every_steps, wanted.max_steps) * wanted.accumulate,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        log_every_n_steps=wanted.log_every_steps,
        logger=tracker.loggers,
        callbacks=callbacks,
        use_distributed_sampler=False,
        enable_model_summary=False,
        enable_progress_bar=any(isinstance(callback, ProgressBar) for callback in callbacks),
        default_root_dir=job.folder,
    )


def _strategy(config: ExperimentConfig, module: DrafterModule) -> str | Strategy:
    if num_ranks() == 1:
        return "auto"
    if config.trainer.strategy == "fsdp":
        return ModelParallelStrategy(num_ranks(), 1, save_distributed_checkpoint=False)
    return DDPStrategy(find_unused_parameters=module.has_idle_head)


def _as_given(drafter: Any) -> dict[str, Any]:
    """The record of a drafter that was not trained here."""
    return {
        "seconds": {"train": 0.0},
        "steps": 0,
        "selected_step": 0,
        "checkpoint": None,
        "learning_curve": [],
        "trainable_parameters": sum(p.numel() for p in drafter.parameters()),
    }


def _results(
    job: Job,
    target: Target,
    data: PreparedData | None,
    training: dict[str, Any],
    evaluation: Evaluation,
    prompts_sha256: dict[str, str],
) -> dict[str, Any]:
    config = job.config
    return {
        **job.header,
        "job": job.folder.name,
        "rows": evaluation.rows,
        "training": training,
        "provenance": provenance(config, target, data.provenance if data is not None else {}, prompts_sha256),
    }


def _prompt_hashes(benchmarks: dict[str, list[Prompt]]) -> dict[str, str]:
    return {name: short_digest([p.messages for p in prompts]) for name, prompts in benchmarks.items()}
