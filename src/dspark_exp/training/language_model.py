"""A plain causal language model as a LightningModule, used to train the embedded target.

In: padded conversations with supervision. Out: a trained Transformers model. Knows nothing about drafters.
"""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

IGNORED = -100


class CausalLanguageModel(L.LightningModule):
    """Next-token cross-entropy on supervised tokens, AdamW with warm-up and cosine decay."""

    def __init__(self, model: Any, lr: float, num_steps: int, warmup_ratio: float = 0.04) -> None:
        super().__init__()
        self.model = model
        self.lr, self.num_steps, self.warmup_ratio = lr, num_steps, warmup_ratio

    def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
        labels = batch["input_ids"].masked_fill(~batch["supervised"], IGNORED)
        hidden = self.model.model(batch["input_ids"], attention_mask=batch["attention_mask"]).last_hidden_state
        predicts = labels[:, 1:] != IGNORED
        logits = self.model.lm_head(hidden[:, :-1][predicts])
        loss = nn.functional.cross_entropy(logits.float(), labels[:, 1:][predicts])
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> Any:
        decay = [p for p in self.parameters() if p.dim() > 1]
        plain = [p for p in self.parameters() if p.dim() <= 1]
        optimizer = torch.optim.AdamW(
            [{"params": decay, "weight_decay": 0.05}, {"params": plain, "weight_decay": 0.0}],
            lr=self.lr,
            betas=(0.9, 0.98),
        )
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, self.lr, total_steps=self.num_steps, pct_start=self.warmup_ratio, final_div_factor=100
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
