"""What is replaced for hooks of components in the loops of OpenCLIP 2.26 to 3.3 and of 4.2 alike."""

from functools import partial

from training_ext.core.seam import MAIN, TRAIN, Seam

EVALUATE = Seam(
    MAIN, "evaluate",
    why="metrics are logged, compared, and choose the best weights",
    contract="called after each epoch as (model or task, data, completed_epoch, args, tb_writer=, tokenizer=), returns "
    "metrics by name, {} on all processes but 0",
    replacement=lambda original, run: partial(run.events.evaluate, original),
)
GET_DATA = Seam(
    MAIN, "get_data",
    why="components look at the data before the first step, and may make OpenCLIP evaluate",
    contract="main calls get_data(args, transforms, epoch=, tokenizer=) after start-up of the processes",
    replacement=lambda original, run: partial(run.events.get_data, original),
)


def zero_shot(name: str) -> Seam:
    """The seam of the function of this name by which `evaluate` classifies."""
    return Seam(
        TRAIN, name,
        why="zero-shot classification of other images than ImageNet's",
        contract="evaluate calls it as (model or task, data, epoch, args, tokenizer=), whatever the data, and adds "
        "what it returns to metrics",
        replacement=lambda original, run: partial(run.events.zero_shot, original),
        used_by=f"{TRAIN}:evaluate",
    )
