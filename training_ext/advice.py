"""What of a run's settings will not work on data of its size, in one sentence each."""

from argparse import Namespace
from collections.abc import Iterator
from math import exp, log

from open_clip_ext.presets import drrho_gamma
from training_ext.params import starts_from_weights, trains_logit_scale

FEW_STEPS = 10  # of an epoch: schedules that go by epochs, and a fifth of a pass, become coarse below
EARLY_STEPS = 50  # of a training in which queue and network are worse than a minibatch: 300 scenes, docs/settings.md
USEFUL_MOVE = log(2)  # of log(1 / tau): from 0.07 to 0.035


def advise(args: Namespace, num_samples: int, steps_per_epoch: int) -> list[str]:
    """Sentences for the log, each with the flag, its value and what to try; none where all is well.

    Args:
        args: as `params.parse_args` gives them, with a loss of ours.
        num_samples: n, rows of the train data.
        steps_per_epoch: optimizer steps of one epoch of OpenCLIP's.
    """
    steps = args.epochs * steps_per_epoch
    return [
        *_on_steps(args, num_samples, steps_per_epoch),
        *_on_length(args, steps),
        *_on_warmup(args, steps),
        *_on_temperature(args, steps),
        *_on_gamma(args),
        *_on_sizes(args, num_samples, steps_per_epoch),
    ]


def _on_steps(args: Namespace, num_samples: int, steps_per_epoch: int) -> Iterator[str]:
    if steps_per_epoch < FEW_STEPS:
        yield (
            f"--batch-size: an epoch is only {steps_per_epoch} optimizer step(s), {args.epochs * steps_per_epoch} in "
            f"all; for {FEW_STEPS} an epoch use a global batch of at most {max(2, num_samples // FEW_STEPS)}"
        )
        if args.normalizer == "prototypes":
            yield (
                f"--loss: with {steps_per_epoch} optimizer step(s) an epoch a network was better than a minibatch's "
                "own estimates in two runs of three (300 scenes), a queue in all of three; try --loss queue"
            )


def _on_length(args: Namespace, steps: int) -> Iterator[str]:
    if args.normalizer in ("prototypes", "queue") and steps < EARLY_STEPS:
        yield (
            f"--epochs: {steps} step(s) in all, where --normalizer {args.normalizer} was better than a minibatch's own "
            f"estimates from some {EARLY_STEPS} on; train longer, or use --loss fastclip-v3 --normalizer batch"
        )


def _on_warmup(args: Namespace, steps: int) -> Iterator[str]:
    if not args.skip_scheduler and args.warmup > steps:
        yield (
            f"--warmup: {args.warmup} steps where the training has {steps}, so that the learning rate ends at "
            f"{100 * steps / args.warmup:.3g} % of --lr; a tenth of the training is --warmup {max(1, steps // 10)}"
        )


def _on_temperature(args: Namespace, steps: int) -> Iterator[str]:
    """A step of Adam moves log(1 / tau) by about --lr-tau at most; pretrained weights come with their temperature."""
    if not trains_logit_scale(args) or starts_from_weights(args) or args.lr_tau is None:
        return
    farthest = args.lr_tau * steps
    if farthest < USEFUL_MOVE:
        yield (
            f"--lr-tau: at {args.lr_tau:.3g} the temperature can fall to no less than {exp(-farthest):.3g} of its "
            f"start in {steps} steps; to let it halve give at least {USEFUL_MOVE / steps:.1g}, or set --tau-init"
        )


def _on_gamma(args: Namespace) -> Iterator[str]:
    if args.normalizer != "table" or args.gamma is None:
        return
    recommended = drrho_gamma(args.loss_epochs)
    if args.gamma < recommended / 2:
        yield (
            f"--gamma: {args.gamma:g} averages over some {1 / args.gamma:.0f} visits of a sample, where "
            f"{args.loss_epochs} epoch(s) have as many; DRRho-CLIP's rule gives {recommended:.2g}"
        )


def _on_sizes(args: Namespace, num_samples: int, steps_per_epoch: int) -> Iterator[str]:
    for flag, size in (("--queue-size", args.queue_size), ("--npn-prototypes", args.npn_prototypes)):
        if size is not None and size > num_samples:
            yield f"{flag}: {size} for {num_samples} samples; {num_samples} are held, so that none counts twice"
    if args.npn_restart_every == 1:
        yield (
            "--npn-restart-every: 1 starts the network anew at every step, so that it learns nothing; a pass over the "
            f"data is {steps_per_epoch} step(s)"
        )
