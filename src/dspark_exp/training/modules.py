"""LightningModules of the drafters: features in, objective out, logging. No maths, no files.

Validation runs the real draft loop on held-out prompts; ``val/tau`` selects the checkpoint.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from dspark_exp.contracts import TargetFeatures
from dspark_exp.data.anchors import draw_anchors
from dspark_exp.errors import ConfigError
from dspark_exp.metrics import AcceptedLength
from dspark_exp.objectives import BlockObjective, ObjectiveResult, TrainingTimeTestObjective
from dspark_exp.training.data_module import as_features
from dspark_exp.training.sharding import Sharded, whole_tensor

log = logging.getLogger(__name__)
ComputeFeatures = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
DraftLoop = Callable[[nn.Module, Sequence[list[int]]], Sequence[Sequence[Any]]]


@dataclass(frozen=True)
class Optimization:
    """AdamW with linear warm-up and cosine decay to zero; one rule for all drafters.

    Raises:
        ConfigError: learning rate or steps not above zero, warm-up outside [0, 1).
    """

    lr: float
    num_steps: int
    warmup_ratio: float = 0.04
    head_lr_scale: float = 1.0
    weight_decay: float = 0.0
    beta2: float = 0.999
    clip: float = 1.0

    def __post_init__(self) -> None:
        if self.lr <= 0 or self.num_steps < 1 or not 0 <= self.warmup_ratio < 1 or self.head_lr_scale <= 0:
            raise ConfigError(
                f"trainer needs lr > 0, max_steps >= 1, 0 <= warmup_ratio < 1, head_lr_scale > 0; got lr={self.lr}, "
                f"max_steps={self.num_steps}, warmup_ratio={self.warmup_ratio}, head_lr_scale={self.head_lr_scale}."
            )
        if self.clip <= 0:
            raise ConfigError(f"trainer.clip={self.clip}: expected a gradient norm above 0.")

    def factor(self, step: int) -> float:
        """Learning-rate factor of optimizer step ``step`` (0-based)."""
        warmup = max(1, round(self.num_steps * self.warmup_ratio))
        if step < warmup:
            return (step + 1) / warmup
        done = (step - warmup) / max(1, self.num_steps - warmup)
        return 0.5 * (1 + math.cos(math.pi * min(1.0, done)))

    def build(self, backbone: list[nn.Parameter], heads: list[nn.Parameter]) -> dict[str, Any]:
        groups = [{"params": backbone, "lr": self.lr}]
        if heads:
            groups.append({"params": heads, "lr": self.lr * self.head_lr_scale})
        optimizer = torch.optim.AdamW(groups, betas=(0.9, self.beta2), weight_decay=self.weight_decay, fused=True)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, self.factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class DrafterModule(L.LightningModule):
    """What the variants share: optimizer, logging, validation by drafting.

    Args:
        drafter: the network that trains.
        optimization: learning rates and schedule.
        seed: with the step, decides the anchors.
        num_anchors: blocks a sequence (drafters that train every position ignore it).
        compute_features: computes target features of a batch that carries none (features=online).
        draft_loop: runs the real decoding loop; returns the rounds of every prompt.
        sharded: spread the drafter over the ranks, whose mesh Lightning's strategy makes.
    """

    drafter: Any
    objective: Any
    val_tau_by_domain: Any

    def __init__(
        self,
        drafter: nn.Module,
        optimization: Optimization,
        seed: int,
        num_anchors: int,
        compute_features: ComputeFeatures | None = None,
        draft_loop: DraftLoop | None = None,
        sharded: bool = False,
    ) -> None:
        super().__init__()
        self._is_sharded = sharded
        self._sharded: Sharded | None = None
        self.drafter, self.optimization = drafter, optimization
        self.seed, self.num_anchors = seed, num_anchors
        self._compute_features, self._draft_loop = compute_features, draft_loop
        self.val_tau = AcceptedLength()
        self.val_tau_by_domain = nn.ModuleDict()
        self.learning_curve: list[dict[str, float]] = []

    def configure_model(self) -> None:
        """Lightning's moment to spread a model over ranks."""
        if self._is_sharded and self._sharded is None:
            assert self.device_mesh is not None
            self._sharded = Sharded(self.drafter, self.device_mesh["data_parallel"])

    def whole_drafter(self) -> Any:
        """The drafter as every rank can use it alone; where it is sharded, all ranks ask together."""
        return self.drafter if self._sharded is None else self._sharded.whole()

    @property
    def has_idle_head(self) -> bool:
        """Whether a head gets no gradient because its loss weighs nothing."""
        return self.drafter.confidence_head is not None and self.objective.confidence == 0

    def objective_of(self, features: TargetFeatures, step: int) -> ObjectiveResult:
        """Loss of one batch at an optimizer step. Implemented by the variants."""
        raise TypeError(f"{type(self).__name__} does not say how its loss is computed.")

    def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
        if "taps" not in batch:
            if self._compute_features is None:
                raise ConfigError("A batch without features came in, but no target was given to compute them.")
            taps, final = self._compute_features(batch["input_ids"], batch["attention_mask"])
            batch = {**batch, "taps": taps, "final": final}
        result = self.objective_of(as_features(batch), self.global_step)
        self._log_result(result)
        # DDP averages gradients over ranks, and each rank holds its share of one sum
        return result.loss * self.trainer.world_size

    def _log_result(self, result: ObjectiveResult) -> None:
        self.log("train/loss", self._sum_over_ranks(result.loss.detach().float()), prog_bar=True)
        if self.global_step % max(1, self.trainer.log_every_n_steps):  # type: ignore[attr-defined]
            return
        terms = {f"train/{name}": self._sum_over_ranks(value.float()) for name, value in result.terms.items()}
        sums, counts = self._sum_over_ranks(result.accept_sum), self._sum_over_ranks(result.accept_count)
        accept = sums / counts.clamp(min=1)
        terms |= {f"train/accept_pos_{k + 1}": value for k, value in enumerate(accept)}
        terms["train/predicted_tau"] = 1 + accept.cumprod(0).sum()
        self.log_dict(terms)

    def _sum_over_ranks(self, value: Tensor) -> Tensor:
        if self.trainer.world_size == 1:
            return value
        summed: Any = self.trainer.strategy.reduce(value.clone(), reduce_op="sum")
        assert isinstance(summed, Tensor)
        return summed

    def on_validation_epoch_start(self) -> None:
        # on every rank every domain, also those none of whose prompts it drafts for: sums are collective
        for domain in self.trainer.datamodule.domains:  # type: ignore[attr-defined]
            if domain not in self.val_tau_by_domain:
                self.val_tau_by_domain[domain] = AcceptedLength().to(self.device)

    def validation_step(self, batch: Sequence[tuple[list[int], str]], _: int) -> dict[str, list[Any]]:
        """Draft for every prompt; returns all rounds, for callbacks that look closer."""
        assert self._draft_loop is not None
        rounds = self._draft_loop(self.whole_drafter(), [ids for ids, _ in batch])
        if self._sharded is not None:
            self._sharded.release()
        for (_ids, domain), of_prompt in zip(batch, rounds, strict=True):
            emitted = torch.tensor([r.emitted for r in of_prompt], device=self.device)
            self.val_tau.update(emitted)
            self.val_tau_by_domain[domain].update(emitted)
        return {"rounds": [r for of_prompt in rounds for r in of_prompt]}

    def on_validation_epoch_end(self) -> None:
        point = {"step": float(self.global_step), "tau": float(self.val_tau.compute())}
        for domain, metric in sorted(self.val_tau_by_domain.items()):
            point[f"tau/{domain}"] = float(metric.compute())
            self.log(f"val/tau_{domain}", point[f"tau/{domain}"])
        self.log("val/tau", point["tau"], prog_bar=True)
        for metric in (self.val_tau, *self.val_tau_by_domain.values()):
            metric.reset()
        self.learning_curve.append(point)
        log.info("step %d of %d: val/tau %.2f", self.global_step, self.optimization.num_steps, point["tau"])

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["learning_curve"] = self.learning_curve

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.learning_curve = list(checkpoint["learning_curve"])

    def configure_gradient_clipping(self, *_: Any, **__: Any) -> None:
        # by hand: Lightning refuses to clip before a fused optimizer, which matters for float16 scaling alone
        norm = torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), self.optimization.clip)
        self.log("train/grad_norm", whole_tensor(norm))

    def configure_optimizers(self) -> Any:
        heads = self.drafter.head_parameters()
        in_heads = {id(parameter) for parameter in heads}
        return self.optimization.build([p for p in self.drafter.parameters() if id(p) not in in_heads], heads)


class BlockDrafterModule(DrafterModule):
    """DFlash and DSpark: anchors are drawn anew every step, blocks are teacher-forced."""

    def __init__(self, *args: Any, objective: BlockObjective, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.objective = objective

    def objective_of(self, features: TargetFeatures, step: int) -> ObjectiveResult:
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + step) * 1_009 + self.global_rank)
        blocks = draw_anchors(
            features.input_ids,
            features.supervised,
            self.num_anchors,
            self.drafter.block_size,
            generator,
        )
        output = self.drafter(features, blocks)
        progress = step / self.optimization.num_steps
        return self.objective(output, blocks, features, self.drafter.frozen, progress, self._sum_over_ranks)


class Eagle3Module(DrafterModule):
    """Eagle3: every position that its objective counts, ``block_size`` training-time-test steps."""

    def __init__(self, *args: Any, objective: TrainingTimeTestObjective, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.objective = objective

    def objective_of(self, features: TargetFeatures, step: int) -> ObjectiveResult:
        horizon = self.drafter.block_size
        steps = self.drafter(features, horizon, self.objective.needed(features, horizon))
        normed = [self.drafter.norm(hidden) for hidden in steps]
        return self.objective(normed, features, self.drafter.frozen, self._sum_over_ranks)
