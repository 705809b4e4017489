"""THE table of seams: every replaced name of OpenCLIP's training code, why, and what the replacement relies on.

The rows for the task loop only are in `task_seams`. OpenCLIP's main (see `hosts`) runs unchanged: its code looks a name
up when it uses it, so it finds the value that replaces the name for the duration of the run. Nothing else of OpenCLIP
is changed or copied.
"""

from contextlib import AbstractContextManager
from functools import partial
from inspect import isfunction

from training_ext.core.component import registry
from training_ext.core.hosts.both import data_parallel
from training_ext.core.patching import look_up, replaced
from training_ext.core.seam import replacements
from training_ext.data.captions import with_captions_in_txt
from training_ext.data.checkpoint_files import latest_checkpoint
from training_ext.data.data_seams import TRAIN_DATA, VAL_DATA
from training_ext.feature import Feature
from training_ext.openclip.hosts import LEGACY, host
from training_ext.run import FEATURES
from training_ext.seam import DATA, MAIN, SHARDS, TRAIN, Seam
from training_ext.session import Session
from training_ext.task_seams import TASK_SEAMS

SEAMS = (
    Seam(
        MAIN, "parse_args",
        why="our flags are parsed together with OpenCLIP's, before anything is written",
        contract="main(args) calls parse_args(args) once, first",
        replacement=lambda original, session: lambda argv: session.args,
    ),
    Seam(
        MAIN, "init_distributed_device",
        why="processes started with another loss or other data must be detected before they train together",
        contract="main(args) calls init_distributed_device(args) once, before it writes; then the group is there",
        replacement=lambda original, session: partial(session.init_distributed, original),
    ),
    Seam(
        MAIN, "get_latest_checkpoint",
        why="--resume latest finds nothing in a folder with [ or * in its name, and takes files from checkpoints_old",
        contract="main calls get_latest_checkpoint(folder, remote=bool) and resumes from the path that it returns",
        replacement=lambda original, session: partial(latest_checkpoint, original),
    ),
    Seam(
        MAIN, "torch.save",
        why="OpenCLIP writes epoch files in place: a kill during a save leaves a torn file that `latest` would pick; "
        "the epoch's file replaces the mid-epoch ones",
        contract="checkpoints are written by torch.save(dict, path)",
        replacement=lambda original, session: partial(session.save_file, original),
    ),
    Seam(
        MAIN, "torch.nn.parallel.DistributedDataParallel",
        why="OpenCLIP passes device_ids also on CPU, where DistributedDataParallel refuses it",
        contract="main wraps the model by DistributedDataParallel(model, device_ids=[device], ...)",
        replacement=data_parallel,
        loop=LEGACY,
    ),
    Seam(
        DATA, "get_dataset_fn",
        why="--dataset-type shapes and folder; the data sets are built with the names below replaced",
        contract="get_data builds each data set by get_dataset_fn(path, type)(args, transform, is_train=, tokenizer=)",
        replacement=lambda original, session: partial(
            session.data.dataset_fn, with_captions_in_txt(original), partial(scoped, session)
        ),
    ),
    Seam(
        DATA, "SyntheticDataset",
        why="carries the rows; stands in for generated scenes",
        contract="get_synthetic_dataset builds SyntheticDataset(transform=, image_size=, dataset_size=, tokenizer=)",
        replacement=lambda original, session: session.data.synthetic(original),
        scopes=(TRAIN_DATA, VAL_DATA),
    ),
    Seam(
        DATA, "CsvDataset",
        why="carries the rows; one image that cannot be read would end the run",
        contract="get_csv_dataset builds CsvDataset(path, ...), whose items are (image, tokens) by line, with the "
        "cells in images and captions",
        replacement=lambda original, session: session.data.csv_lines(original),
        scopes=(TRAIN_DATA, VAL_DATA),
    ),
    Seam(
        DATA, "pd.read_csv",
        why="a column of digits is read as numbers, without their leading zeros",
        contract="CsvDataset reads its cells by pd.read_csv(path, sep=)",
        replacement=lambda original, session: partial(session.data.read_csv, original),
        scopes=(TRAIN_DATA, VAL_DATA),
    ),
    Seam(
        SHARDS, "tarfile_to_samples_nothrow",
        why="a sample's position in its shard is known only where the tar is read; shards that cannot be read are "
        "tried again without end",
        contract="get_wds_dataset uses it for train data as the stage from shard urls to raw samples, dicts with txt, "
        "once for each pass over a worker's shards",
        replacement=lambda original, session: session.data.shard_rows(),
        scopes=(TRAIN_DATA,),
    ),
    Seam(
        SHARDS, "{sample_filter}",
        why="counts what it leaves out",
        contract="get_wds_dataset selects the samples that have a caption and an image by this function, or by what "
        "this class builds",
        replacement=lambda original, session: session.data.complete(original),
        scopes=(TRAIN_DATA,),
        may_be_off=True,
        needed_by=("captions_field", "json_text_key"),
    ),
    Seam(
        SHARDS, "wds.decode",
        why="counts what cannot be decoded",
        contract="get_wds_dataset decodes samples by wds.decode(..., handler=), then takes image and caption by name",
        replacement=lambda original, session: session.data.decode(original),
        scopes=(TRAIN_DATA,),
        loop=LEGACY,
        may_be_off=True,
    ),
    Seam(
        SHARDS, "wds.shuffle",
        why="webdataset seeds its shuffle buffer by time and process number; after the buffer and before decoding, a "
        "resumed epoch drops the samples that it has used",
        contract="get_wds_dataset uses wds.shuffle(bufsize=, initial=) for samples, dicts with txt; the stages that "
        "follow take one sample at a time",
        replacement=lambda original, session: session.data.seeded_shuffle(original),
        scopes=(TRAIN_DATA,),
        for_ext_loss=True,
    ),
    Seam(
        SHARDS, "wds.WebLoader",
        why="loader workers outlive an epoch, and with them the state of their generators; a resumed epoch is shorter",
        contract="get_wds_dataset builds wds.WebLoader(dataset, ...), whose workers take turns from 0 on with a batch "
        "each, and returns a DataInfo with shared_epoch",
        replacement=lambda original, session: session.data.seeded_loader(original),
        scopes=(TRAIN_DATA,),
        for_ext_loss=True,
    ),
    Seam(
        SHARDS, "ResampledShards2",
        why="its seed comes from the loader's workers, which differ in a resumed run",
        contract="get_wds_dataset builds ResampledShards2(urls, ...), which seeds itself by worker_seed() + epoch",
        replacement=lambda original, session: session.data.seeded_shards(original),
        scopes=(TRAIN_DATA,),
        for_ext_loss=True,
    ),
    Seam(
        MAIN, "create_model_and_transforms",
        why="parameters that the loss does not train must not wait for a gradient in DistributedDataParallel",
        contract="main gets the model from it before wrapping it, and the first call is the trained model",
        replacement=lambda original, session: partial(session.create_model, original),
    ),
    Seam(
        MAIN, "optim.AdamW",
        why="the temperature has a learning rate of its own; our state is saved in the optimizer's; a resumed run uses "
        "the settings that it is given, not the checkpoint's",
        contract="main builds optim.AdamW(groups, ...) once, the model's parameters in groups",
        replacement=lambda original, session: partial(session.create_optimizer, original),
        loop=LEGACY,
    ),
    Seam(
        "timm.optim", "create_optimizer_v2",
        why="the same for --opt timm/...",
        contract="main imports create_optimizer_v2 from timm.optim when --opt starts with timm/",
        replacement=lambda original, session: partial(session.create_optimizer, original),
        loop=LEGACY,
    ),
    Seam(
        "open_clip_train.scheduler", "assign_learning_rate",
        why="OpenCLIP's schedules set one rate for every group, before 2.30 a number of NumPy's",
        contract="every schedule calls assign_learning_rate(optimizer, lr), before each batch",
        replacement=lambda original, session: partial(session.assign_learning_rate, original),
        for_ext_loss=True,
        for_components=True,
    ),
    Seam(
        TRAIN, "enumerate",
        why="a resumed epoch resumes at its step, by which OpenCLIP sets learning rates and logs; between two steps "
        "state is saved and numbers are logged",
        contract="train_one_epoch numbers the batches by the built-in enumerate(data['train'].dataloader), from which "
        "alone it tells the step, and asks for the next batch when the optimizer's step is done",
        replacement=lambda original, session: partial(session.enumerate, original),
    ),
    Seam(
        TRAIN, "unwrap_model",
        why="OpenCLIP clamps the temperature after each step, which must not move a fixed one, nor any in a recovery",
        contract="train_one_epoch uses unwrap_model(model) only to clamp its logit_scale",
        replacement=lambda original, session: session.clamped(original),
        loop=LEGACY,
    ),
    Seam(
        MAIN, "pt_load",
        why="takes our state out of the checkpoint before OpenCLIP loads the optimizer; OpenCLIP leaves it to torch's "
        "default whether the file's pickles are run",
        contract="main loads --resume by pt_load(path, map_location=), before it creates data and loss",
        replacement=lambda original, session: session.load_checkpoint,
        loop=LEGACY,
    ),
    Seam(
        MAIN, "get_data",
        why="every process needs the row of every sample before it builds its loader; the tokenizer for evaluations; "
        "one's own classes must make OpenCLIP evaluate",
        contract="main calls get_data(args, transforms, epoch=, tokenizer=) after start-up of the processes",
        replacement=lambda original, session: partial(session.get_data, original),
    ),
    Seam(
        MAIN, "create_loss",
        why="the loss itself",
        contract="main calls create_loss(args) once, after get_data and pt_load, and only to train",
        replacement=lambda original, session: partial(session.create_loss, original),
        loop=LEGACY,
    ),
    Seam(
        MAIN, "train_one_epoch",
        why="schedules by epoch, seeds by epoch, gathering the state that only some processes hold; before the first "
        "epoch the recovery of statistics, which is this same epoch at learning rate 0",
        contract="called once per epoch as (model, data, loss, epoch, optimizer, scaler, scheduler, dist_model, args, "
        "tb_writer=), before optimizer.state_dict() is saved; it enumerates data['train'].dataloader, calls set_epoch "
        "of data['train'] and scheduler(step), and gives the numbers of each step that it logs to "
        "tb_writer.add_scalar('train/' + name, number, step)",
        replacement=lambda original, session: partial(session.train_one_epoch, original),
        loop=LEGACY,
    ),
    Seam(
        MAIN, "evaluate",
        why="warns about metrics that are worse than before training, and keeps the best weights",
        contract="called after each epoch as (model or task, data, completed_epoch, args, tb_writer=, tokenizer=), "
        "returns metrics by name, {} on all processes but 0",
        replacement=lambda original, session: partial(session.evaluations.evaluate, original),
        may_be_off=True,
        needed_by=("keep_best",),
    ),
    Seam(
        TRAIN, "get_clip_metrics",
        why="takes 22 bytes for each image and text, before 4.0, and counts an image's other captions as wrong",
        contract="evaluate calls get_clip_metrics(image_features=, text_features=, ...) with the features of all "
        "validation pairs in their order, or lists of batches of them, and adds what it returns to metrics",
        replacement=lambda original, session: session.evaluations.clip_metrics,
        may_be_off=True,
    ),
    Seam(
        TRAIN, "{zero_shot}",
        why="zero-shot classification of generated scenes and of one's own classes (--zeroshot-data)",
        contract="evaluate calls it as (model or task, data, epoch, args, tokenizer=), whatever the data, and adds "
        "what it returns to metrics",
        replacement=lambda original, session: partial(session.evaluations.zero_shot, original),
        may_be_off=True,
        needed_by=("zeroshot_data",),
    ),
    *TASK_SEAMS,
)


def seams() -> tuple[Seam, ...]:
    """The rows of the table for the installed training loop, with its names filled in."""
    return tuple(seam.of(host()) for seam in SEAMS if seam.loop in (None, host().loop))


def listing() -> str:
    """The table for the installed training loop, with its components', and the features that answer each event."""
    names = [(f"{seam.module}.{seam.path}", seam.why) for seam in seams()]
    names += [(seam.name, seam.why) for kind in registry().values() for seam in kind.seams]
    rows = [f"{name}\n    {why}" for name, why in names]
    events = [name for name, event in vars(Feature).items() if isfunction(event) and not name.startswith("_")]
    listeners = {
        name: [feature.__name__ for feature in FEATURES if getattr(feature, name) is not getattr(Feature, name)]
        for name in events
    }
    answered = (f"{name:16} {', '.join(found)}" for name, found in listeners.items())
    return "\n".join([f"{len(rows)} names are replaced:", *rows, "", "Events, and who answers them:", *answered])


def scoped(session: Session, scope: str) -> AbstractContextManager[None]:
    """A context in which the names of `scope` are replaced, by components first."""
    values = replacements(((seam, owner) for owner in session.components for seam in owner.seams), scope)
    for seam in seams():
        for_components = seam.for_components and session.has_trained_components
        is_used = session.args.uses_ext_loss or not seam.for_ext_loss or for_components
        if scope in seam.scopes and is_used and seam.is_there():
            place = seam.module, seam.path
            original = values[place] if place in values else look_up(*place)
            values[place] = seam.replacement(original, session)
    return replaced(values)
