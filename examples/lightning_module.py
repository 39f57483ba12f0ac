"""Train with Lightning: the Trainer provides checkpoints, resuming, precision and accumulation; SEL clips.

python examples/lightning_module.py --out runs/lightning             # again: continues from the last epoch
"""

import argparse
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

import symexplin as sel
from symexplin.lightning import setup


class Regressor(L.LightningModule):
    """A small network that learns a fixed function."""

    config: sel.SELConfig | None = None  # the default map

    def __init__(self, width: int = 32, lr: float = 1e-3) -> None:
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(nn.Linear(8, width), nn.LayerNorm(width), nn.GELU(), nn.Linear(width, 4))

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return the loss of a batch, and log it with the statistics of the curved weights."""
        inputs, targets = (part.to(self.dtype) for part in batch)
        loss = nn.functional.mse_loss(self.net(inputs), targets)
        self.log("loss", loss)
        self.log_dict(sel.stats(self, self.optimizers()))
        return loss

    def configure_optimizers(self) -> dict[str, object]:
        """Return the optimizer, with total steps and clipping from the Trainer, and a scheduler."""
        optimizer = sel.SELAdamW(self, lr=self.lr, weight_decay=0.01, config=self.config, **setup(self.trainer))
        steps = int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def data(batch_size: int) -> torch.utils.data.DataLoader[tuple[Tensor, ...]]:
    """Return batches of inputs and targets, the same in every process."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(96, 8, generator=generator)
    targets = (inputs @ torch.randn(8, 4, generator=generator)).tanh()
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, targets), batch_size)


def fit(out: Path, epochs: int, *callbacks: L.Callback, width: int = 32, **settings: Any) -> Regressor:
    """Train up to `epochs`, from the last checkpoint in `out` if there is one; return the module."""
    torch.manual_seed(0)
    module = Regressor(width)
    saver = L.pytorch.callbacks.ModelCheckpoint(dirpath=out, filename="last", enable_version_counter=False)
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    defaults = {"accelerator": "auto", "gradient_clip_val": 1.0, **quiet}
    trainer = L.Trainer(max_epochs=epochs, callbacks=[saver, *callbacks], **defaults | settings)
    last = out / "last.ckpt"
    trainer.fit(module, data(16), ckpt_path=last if last.exists() else None, weights_only=True)
    return module


def main() -> None:
    """Train and print the last loss."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=20)
    arguments = parser.parse_args()
    module = fit(arguments.out, arguments.epochs)
    print(f"loss {float(module.trainer.callback_metrics['loss']):.4f}")


if __name__ == "__main__":
    main()
