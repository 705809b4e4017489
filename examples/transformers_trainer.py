"""A CLIPModel trained by the Trainer of transformers with a loss of this package: `pip install accelerate`, then

    python examples/transformers_trainer.py --loss fastclip-v3 --epochs 4

It trains a tiny CLIPModel from scratch on generated scenes, on one process or under torchrun; --resume resumes. For
your own model and data, keep WithLoss, ContrastiveTrainer and LossState; the data set returns each sample's row as
`index`. It ends with the recall on held-out scenes, before and after.
"""

import argparse
import math
from pathlib import Path

import open_clip
import torch
from torch.utils.data import Dataset, default_collate
from transformers import CLIPConfig, CLIPModel, Trainer, TrainerCallback, TrainingArguments

from open_clip_ext import InputError, create_loss
from open_clip_ext.data import Scenes
from open_clip_ext.distributed import world_size
from open_clip_ext.files import whole_file
from open_clip_ext.losses import NonFiniteError
from open_clip_ext.retrieval import retrieval_ranks
from training_ext.core.skipped_step import pass_over

STATE = "contrastive_loss.pt"  # a file in each of the Trainer's checkpoints


class WithRow(Dataset):
    """Scenes in CLIPModel's format, with the sample's row, which is the same in every epoch."""

    def __init__(self, scenes: Scenes):
        self.scenes = scenes

    def __len__(self) -> int:
        return len(self.scenes)

    def __getitem__(self, row: int) -> dict:
        image, tokens = self.scenes[row]
        return {"pixel_values": image, "input_ids": tokens, "attention_mask": (tokens != 0).long(), "index": row}


class WithLoss:
    """What a Trainer with a loss from `create_loss` does besides computing it."""

    def __init__(self, *args, contrastive_loss, **kwargs):
        super().__init__(*args, callbacks=[LossState(contrastive_loss)], **kwargs)
        if (parts := self.args.gradient_accumulation_steps) > 1:
            reason = "parts do not see one another's negatives; give 1 and a larger batch, or see docs/custom-loop.md"
            raise InputError(f"{parts} {reason}", "gradient_accumulation_steps")
        self.contrastive_loss = contrastive_loss

    def get_decay_parameter_names(self, model):
        """Without the temperature, which weight decay would pull towards 1."""
        return [name for name in super().get_decay_parameter_names(model) if not name.endswith("logit_scale")]

    def log(self, logs, *args, **kwargs):
        if {"loss", "train_loss"} & logs.keys():  # a training step's line, or the last
            try:
                self.contrastive_loss.raise_if_not_finite()
            except NonFiniteError as error:  # ends the training, unless the scaler of fp16=True skipped the step
                pass_over(error, self.model, self.accelerator.scaler)
            logs = logs | {name: value.item() for name, value in self.contrastive_loss.diagnostics().items()}
        super().log(logs, *args, **kwargs)


class ContrastiveTrainer(WithLoss, Trainer):
    """A Trainer of a CLIPModel."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.can_return_loss = True  # without labels, an evaluation would otherwise compute no loss

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        inputs = dict(inputs)
        rows = inputs.pop("index")
        if not model.training:  # validation pairs have no rows in the train data, so CLIP's own loss
            outputs = model(**inputs, return_loss=True)
            return (outputs.loss, {"loss": outputs.loss}) if return_outputs else outputs.loss
        outputs = model(**inputs)  # its embeddings are unit vectors
        scale = self.accelerator.unwrap_model(model).logit_scale.exp()
        value = self.contrastive_loss(outputs.image_embeds, outputs.text_embeds, scale, index=rows)
        return (value, outputs) if return_outputs else value


class LossState(TrainerCallback):
    """Tells the loss the epoch, and keeps its state in the Trainer's checkpoints."""

    def __init__(self, loss):
        self.loss = loss

    def on_train_begin(self, args, state, control, **kwargs):
        if state.global_step > 0:  # resumed
            path = Path(args.output_dir, f"checkpoint-{state.global_step}", STATE)
            self.loss.load_state_dict(torch.load(path, weights_only=True))

    def on_epoch_begin(self, args, state, control, **kwargs):
        self.loss.set_epoch(int(state.epoch or 0))

    def on_step_end(self, args, state, control, model=None, **kwargs):
        (logit_scale,) = (value for name, value in model.named_parameters() if name.endswith("logit_scale"))
        if logit_scale.requires_grad:
            with torch.no_grad():
                logit_scale.clamp_(0, math.log(100))  # as OpenCLIP

    def on_save(self, args, state, control, **kwargs):
        loss_state = self.loss.state_dict()  # every process must call it
        if state.is_world_process_zero:
            with whole_file(Path(args.output_dir, f"checkpoint-{state.global_step}", STATE)) as file:
                torch.save(loss_state, file)


class Recall(TrainerCallback):
    """Prints the recall on held-out pairs before the first step and after the last."""

    def __init__(self, embed):
        self.embed = embed  # model -> embeddings of the held-out pairs, (n, d) and (n, d)

    @torch.no_grad()
    def on_train_begin(self, args, state, control, model=None, **kwargs):
        if state.is_world_process_zero:
            there, back = (f"{100 * ranks.recall(1):.1f}" for ranks in retrieval_ranks(*self.embed(model.eval())))
            print(f"step {state.global_step}: R@1 on held-out pairs {there} %, in reverse {back} %", flush=True)

    on_train_end = on_train_begin


def tiny_model() -> CLIPModel:
    tower = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2)
    tokens = dict(vocab_size=49408, max_position_embeddings=32, bos_token_id=49406, eos_token_id=49407)
    vision = dict(**tower, image_size=48, patch_size=8)
    return CLIPModel(CLIPConfig(text_config={**tower, **tokens}, vision_config=vision, projection_dim=64))


def scenes(num_samples: int, seed: int) -> Scenes:
    tokenizer = open_clip.SimpleTokenizer(context_length=32)
    transform = open_clip.image_transform(48, is_train=False)
    return Scenes(num_samples, seed, image_size=48, transform=transform, tokenizer=tokenizer)


def parse(argv: list[str] | None, description: str, **defaults) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--loss", default="fastclip-v3")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--batch-size", type=int, default=64, help="pairs per process")
    parser.add_argument("--out", default="trainer")
    parser.add_argument("--resume", action="store_true", help="resume from the last checkpoint in --out")
    parser.set_defaults(**defaults)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> ContrastiveTrainer:
    given = parse(argv, __doc__.splitlines()[0])
    settings = TrainingArguments(
        given.out, num_train_epochs=given.epochs, per_device_train_batch_size=given.batch_size, learning_rate=1e-3,
        per_device_eval_batch_size=64, save_strategy="epoch", eval_strategy="epoch", logging_steps=10, report_to="none",
        remove_unused_columns=False,  # True would drop `index`
        use_cpu=not torch.cuda.is_available(),  # without it the processes of torchrun do not find each other
        dataloader_drop_last=True,  # the loss needs the same number of pairs on every process
    )
    train, held_out = (WithRow(scenes(size, seed)) for size, seed in ((given.samples, 0), (256, 1)))
    loss = create_loss(
        given.loss, num_samples=len(train), epochs=given.epochs, device=settings.device,
        steps_per_epoch=max(1, len(train) // (given.batch_size * world_size())),
    )
    torch.manual_seed(settings.seed)
    model = tiny_model()
    model.logit_scale.requires_grad_(loss.trains_logit_scale)
    trainer = ContrastiveTrainer(model, settings, train_dataset=train, eval_dataset=held_out, contrastive_loss=loss)
    pairs = default_collate([held_out[row] for row in range(len(held_out))])

    def embed(model):
        outputs = model(**{name: value.to(model.device) for name, value in pairs.items() if name != "index"})
        return outputs.image_embeds, outputs.text_embeds

    trainer.add_callback(Recall(embed))
    trainer.train(resume_from_checkpoint=given.resume)
    return trainer


if __name__ == "__main__":
    main()
