"""Warnings about settings that do not fit the size of the data or the length of the training."""

import logging
from argparse import Namespace
from collections.abc import Iterator
from contextlib import suppress
from math import ceil, exp, log
from typing import Any

import torch

from open_clip_ext.normalizers.npn import adagrad_rate
from open_clip_ext.presets import drrho_gamma
from training_ext.core.component import Component
from training_ext.core.loss import build_loss
from training_ext.core.plan import global_batch
from training_ext.core.temperature import trains_logit_scale
from training_ext.data.keys import has_keys
from training_ext.data.rows import DataRows, counts_an_epoch
from training_ext.data.seen_captions import SeenCaptions
from training_ext.data.settings import FEWEST_STEPS, recommended_lr_tau
from training_ext.data.usual import unusual
from training_ext.openclip.hosts import starts_from_weights
from training_ext.openclip.loading import load_tokenizer, without_warnings

AMORLIP_STEPS = 1000  # per epoch: the paper's form collapsed with 250, and trained with 3,125, docs/evidence/scenes.md
PRETRAINED_NPN_LR = 0.1  # AdaGrad's; at 1 a trained model lost 6 points of R@1 in 500 steps, docs/evidence/flags.md
LONGER = 8  # times the context length: the longest caption that is measured
USEFUL_MOVE = log(2)  # in log(1 / tau): for example from 0.07 to 0.035


class Advice(Component):
    """Logs the warnings on process 0, of a training with any loss."""

    name = "advice"

    def check_rows(self, rows: DataRows, resumes: bool) -> None:
        for sentence in advise_on_captions(self.args, rows.seen) if self._is_left() else ():
            logging.warning(sentence)

    def data_built(self, data: dict[str, Any]) -> None:
        if "train" in data and self.plan.is_first and self.args.loss is not None and self._is_left():
            steps = self.plan.steps(data["train"].dataloader.num_batches)
            for sentence in advise(self.args, self.training.data.num_rows, steps):
                logging.warning(sentence)

    def _is_left(self) -> bool:
        """Whether there is anything left to train; a new training of 0 epochs is told that there is not."""
        return not 0 < self.args.epochs <= self.training.state.done


def advise(args: Namespace, num_samples: int, steps_per_epoch: int) -> list[str]:
    """Warnings, each with the flag, its value and what to try; [] if all is well.

    Args:
        num_samples: n, rows of the train data; not used with OpenCLIP's losses.
        steps_per_epoch: optimizer steps per epoch.
    """
    steps = args.epochs * steps_per_epoch
    if steps == 0:
        return [f"--epochs: {args.epochs} epoch(s) of {steps_per_epoch} optimizer step(s), so nothing is trained"]
    warnings = [*_of_openclip(args, steps), *(f"Far from usual: {flag}" for flag in unusual(args, steps))]
    if args.uses_ext_loss:
        warnings += [
            *_on_steps(args, steps_per_epoch),
            *_on_amorlip(args, steps_per_epoch),
            *_on_pretrained(args, steps),
            *_on_temperature(args, steps),
            *_on_gamma(args, num_samples, steps_per_epoch),
            *_on_rho(args, num_samples),
        ]
    return warnings


def advise_on_captions(args: Namespace, seen: SeenCaptions | None) -> list[str]:
    """Warnings about the captions of the train data; [] if all is well, or if they are not known."""
    return [] if seen is None or not seen.first else [*_on_cut(args, seen), *_on_repeated(args, seen)]


def _on_cut(args: Namespace, seen: SeenCaptions) -> Iterator[str]:
    with suppress(Exception), without_warnings():  # what is wrong with the tokenizer others tell
        tokenizer = load_tokenizer(args)
        length = tokenizer.context_length
        whole = tokenizer(seen.first, context_length=LONGER * length)
        is_padding = whole == tokenizer([""], context_length=LONGER * length)[0, -1]
        # The last token before the cut may be an end of the text.
        cut = (whole[:, :length] != tokenizer(seen.first)).any(1) | ~is_padding[:, length]
        if share := cut.double().mean().item():
            lengths = (~is_padding * torch.arange(1, LONGER * length + 1)).amax(1).clamp(min=length + cut).double()
            lost = (1 - length / lengths[cut]).mean().item()
            enough = 8 * ceil(lengths.quantile(0.99).item() / 8)
            if enough <= length:  # it reads so many whole
                return
            yield (
                f"--model: {100 * share:.2g} % of the first {len(cut)} captions are longer than the {length} tokens "
                f"that {args.model} reads, and lose {100 * lost:.2g} % of theirs; --force-context-length {enough} "
                "lets it read 99 % of the captions whole"
            )


def _on_repeated(args: Namespace, seen: SeenCaptions) -> Iterator[str]:
    if not args.uses_ext_loss or has_keys(args) or not build_loss(args, 1, "cpu").takes_keys:
        return
    if seen.images:
        yield (
            f"--same-key: {seen.images} lines have the image of another, too, and so false negatives; "
            f"--same-key {args.csv_img_key} leaves these out, and --several-captions makes one sample of an image"
        )
    if seen.repeated:
        yield (
            f"--same-caption: {seen.repeated} of {seen.where} are those of another pair, too, and so false negatives; "
            "give the flag to leave these out"
        )


def _of_openclip(args: Namespace, steps: int) -> Iterator[str]:
    if args.lr == 0:
        yield "--lr: 0, so the weights do not change"
    elif not args.skip_scheduler and args.warmup > steps:
        yield (
            f"--warmup: {args.warmup} steps, but the training has {steps}, so the learning rate ends at "
            f"{100 * steps / args.warmup:.3g} % of --lr; a tenth of the training is --warmup {max(1, steps // 10)}"
        )


def _on_steps(args: Namespace, steps_per_epoch: int) -> Iterator[str]:
    if steps_per_epoch < FEWEST_STEPS:
        yield (
            f"--batch-size: an epoch has only {steps_per_epoch} optimizer step(s), the training "
            f"{args.epochs * steps_per_epoch}; for {FEWEST_STEPS} per epoch use a global batch of at most "
            f"{max(2, steps_per_epoch * global_batch(args) // FEWEST_STEPS)}"
        )


def _on_amorlip(args: Namespace, steps_per_epoch: int) -> Iterator[str]:
    if args.amor_denominator == "target" and steps_per_epoch < AMORLIP_STEPS:
        yield (
            "--amor-denominator: target, the paper's form, collapsed with 250 steps per epoch and trained with 3,125; "
            f"this training has {steps_per_epoch}. Try --amor-denominator combined --amor-positive-weight 1e-3"
        )


def _on_pretrained(args: Namespace, steps: int) -> Iterator[str]:
    """At the low temperature of pretrained weights AdaGrad's first steps must be small."""
    if args.loss == "tuneclip" and not starts_from_weights(args) and args.resume is None:
        yield "--loss: tuneclip is for fine-tuning, and trains here from random weights; give --pretrained PATH"
    if args.normalizer != "prototypes" or args.npn_opt != "adagrad" or not starts_from_weights(args):
        return
    rate = adagrad_rate(steps) if args.npn_lr is None else args.npn_lr
    if rate > PRETRAINED_NPN_LR:
        yield (
            f"--npn-lr: {rate:.2g} with pretrained weights; if their temperature is near 0.01, AdaGrad's first steps "
            f"may do them harm; try --npn-lr {PRETRAINED_NPN_LR}"
        )


def _on_temperature(args: Namespace, steps: int) -> Iterator[str]:
    """One step of Adam changes log(1 / tau) by at most about --lr-tau; pretrained weights have a trained tau."""
    if not trains_logit_scale(args) or starts_from_weights(args) or args.lr_tau is None:
        return
    farthest = args.lr_tau * steps
    if farthest < USEFUL_MOVE:
        yield (
            f"--lr-tau: at {args.lr_tau:.3g} the temperature cannot fall below {exp(-farthest):.3g} of its initial "
            f"value in {steps} steps; give about {recommended_lr_tau(steps)} (2 / steps), or set --tau-init"
        )


def _on_gamma(args: Namespace, num_samples: int, steps_per_epoch: int) -> Iterator[str]:
    if args.normalizer != "table" or args.gamma is None:
        return
    samples = args.loss_epochs * steps_per_epoch * global_batch(args)
    visits = max(1, round(samples / num_samples))
    recommended = drrho_gamma(visits)
    if args.gamma < recommended / 2:
        yield (
            f"--gamma: {args.gamma:g} averages over about {1 / args.gamma:.0f} visits of a sample, but there are about "
            f"{visits} in total; DRRho-CLIP's rule gives {recommended:.2g}"
        )


def _on_rho(args: Namespace, num_samples: int) -> Iterator[str]:
    """tau falls while rho is above the KL of an anchor's weights (NeuCLIP, Eq. 13), at most log N of N negatives."""
    if args.rho is None or args.normalizer is None:
        return
    modalities = 1 if args.negatives == "cross" else 2
    batch = global_batch(args)
    of_batch, of_data = (log(modalities * max(1, number - 1)) for number in (batch, num_samples))
    samples = f"{num_samples} samples{' per epoch' if counts_an_epoch(args) else ''}"
    limit, where, what = of_data, samples, "nothing keeps the temperature from falling"
    if args.normalizer == "batch":
        limit, where = of_batch, f"the estimates of batches of {batch}"
    elif args.rho < of_data and args.temperature == "individual" and args.tau_optimizer == "momentum":
        # A first visit's estimate is the batch's own, so that the derivative in tau_i is rho - KL.
        limit, where = of_batch, f"batches of {batch}"
        what = "every temperature falls on its sample's first visit"
    if args.rho >= limit:
        yield f"--rho: {args.rho:g} with {where}: at {limit:.2g} and above {what}; give less"
