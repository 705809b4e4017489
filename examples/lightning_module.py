"""A LightningModule with a loss of this package: `pip install lightning`, then

    python examples/lightning_module.py --loss fastclip-v3 --epochs 4

It trains OpenCLIP's ViT-shapes-tiny on generated scenes, on one device or several. For your own model and data, keep
the class and let the data set return (image, text, row).
"""

import argparse
import math

import lightning
import open_clip
import torch
from torch.utils.data import DataLoader, Dataset

from open_clip_ext import MODEL_CONFIGS, InputError, create_loss
from open_clip_ext.data import Scenes
from open_clip_ext.losses import NonFiniteError
from training_ext.core.skipped_step import pass_over


class WithRow(Dataset):
    """Scenes with the sample's row, which stays the same from epoch to epoch."""

    def __init__(self, scenes: Scenes):
        self.scenes = scenes

    def __len__(self) -> int:
        return len(self.scenes)

    def __getitem__(self, row: int) -> tuple:
        return *self.scenes[row], row


class Contrastive(lightning.LightningModule):
    """An OpenCLIP model and a loss from `create_loss`."""

    def __init__(self, model: torch.nn.Module, loss: torch.nn.Module, lr: float):
        super().__init__()
        self.model = model
        self.lr = lr
        model.logit_scale.requires_grad_(loss.trains_logit_scale)
        self.loss = loss  # a submodule, so that checkpoints have its state

    def training_step(self, batch, batch_number):
        images, texts, rows = batch
        value = self.loss(*self.model(images, texts)[:4], index=rows)  # the fourth is SigLIP's logit_bias
        self.log("loss", value.detach(), prog_bar=True)
        return value

    def validation_step(self, batch, batch_number):
        images, texts, _ = batch
        image_features, text_features = self.model(images, texts)[:2]
        nearest = (image_features @ text_features.T).argmax(dim=1)
        found = (nearest == torch.arange(len(images), device=self.device)).float().mean()
        self.log("recall_at_1", found, prog_bar=True, sync_dist=True)

    def configure_optimizers(self):
        trained = [p for p in self.model.parameters() if p.requires_grad]
        decayed, others = [p for p in trained if p.ndim >= 2], [p for p in trained if p.ndim < 2]
        # Weight decay would pull log(1 / tau) towards 0; like OpenCLIP's, it spares biases and gains, too.
        return torch.optim.AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0}], lr=self.lr)

    def on_train_epoch_start(self):
        if (parts := self.trainer.accumulate_grad_batches) > 1:
            reason = "parts do not see one another's negatives; give 1 and a larger batch, or see docs/custom-loop.md"
            raise InputError(f"{parts} {reason}", "accumulate_grad_batches")
        self.loss.set_epoch(self.current_epoch)

    def on_train_batch_end(self, outputs, batch, batch_number):
        if self.model.logit_scale.requires_grad:
            with torch.no_grad():
                self.model.logit_scale.clamp_(0, math.log(100))  # as OpenCLIP

    def on_train_epoch_end(self):
        try:
            self.loss.raise_if_not_finite()
        except NonFiniteError as error:  # ends the training, unless the scaler of precision="16-mixed" skipped the step
            pass_over(error, self.model, getattr(self.trainer.precision_plugin, "scaler", None))


def loader(num_samples: int, seed: int, batch_size: int, preprocess, tokenizer, shuffle: bool) -> DataLoader:
    data = Scenes(num_samples, seed, image_size=48, transform=preprocess, tokenizer=tokenizer)
    return DataLoader(WithRow(data), batch_size, shuffle=shuffle, drop_last=True)


def main(argv: list[str] | None = None) -> tuple[lightning.Trainer, Contrastive]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--loss", default="fastclip-v3")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--batch-size", type=int, default=64, help="pairs per process")
    parser.add_argument("--out", default="lightning")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--resume", metavar="CHECKPOINT")
    given = parser.parse_args(argv)
    lightning.seed_everything(0, workers=True)
    open_clip.add_model_config(MODEL_CONFIGS)
    name = "ViT-shapes-tiny"
    # As OpenCLIP's command gives a model for SigLIP's loss.
    siglip = {"init_logit_scale": math.log(10), "init_logit_bias": -10.0} if given.loss == "siglip-chunked" else {}
    model, _, preprocess = open_clip.create_model_and_transforms(name, **siglip)
    tokenizer = open_clip.get_tokenizer(name)
    train = loader(given.samples, 0, given.batch_size, preprocess, tokenizer, shuffle=True)
    held_out = loader(256, 1, 64, preprocess, tokenizer, shuffle=False)
    steps = max(1, len(train) // given.devices)
    loss = create_loss(given.loss, num_samples=given.samples, epochs=given.epochs, steps_per_epoch=steps)
    module = Contrastive(model, loss, lr=1e-3)
    trainer = lightning.Trainer(
        max_epochs=given.epochs, devices=given.devices, default_root_dir=given.out, logger=False,
        callbacks=[lightning.pytorch.callbacks.ModelCheckpoint(save_top_k=-1, filename="{epoch}")],
    )
    trainer.fit(module, train, held_out, ckpt_path=given.resume, weights_only=True)
    return trainer, module


if __name__ == "__main__":
    main()
