"""The rows of the table of replaced names that are only for OpenCLIP 4.x's task loop."""

from functools import partial

from training_ext.core.hosts.both import data_parallel
from training_ext.data.data_seams import TRAIN_DATA
from training_ext.openclip.hosts import TASKS
from training_ext.seam import MAIN, SHARDS, TRAIN, Seam

TASK_SEAMS = (
    Seam(
        "open_clip.task.base_task", "torch.nn.parallel.DistributedDataParallel",
        why="OpenCLIP passes device_ids also on CPU, where DistributedDataParallel refuses it",
        contract="prepare_distributed wraps the model by DistributedDataParallel(model, device_ids=[device], ...)",
        replacement=data_parallel,
        loop=TASKS,
    ),
    Seam(
        SHARDS, "wds.map_dict",
        why="counts what cannot be decoded",
        contract="get_wds_dataset decodes the images of renamed samples by wds.map_dict(image=..., handler=), the only "
        "such stage with a handler, and takes captions from .txt",
        replacement=lambda original, session: session.data.decode_images(original),
        scopes=(TRAIN_DATA,),
        loop=TASKS,
        may_be_off=True,
    ),
    Seam(
        MAIN, "create_task",
        why="the loss itself, in a CLIPTask that also gets the batch's rows and clamps the temperature",
        contract="main calls create_task(args, model=, dist_model=, naflex_data_config=) once, before it wraps the "
        "model, whose task it trains by prepare_batch, task(batch), compute_accum_loss and clamp_logit_scale",
        replacement=lambda original, session: partial(session.create_task, original),
        loop=TASKS,
    ),
    Seam(
        MAIN, "create_optimizer",
        why="the temperature has a learning rate of its own; a resumed run uses the settings that it is given",
        contract="main builds its optimizer by create_optimizer(trainable_module, ...), after the model is wrapped",
        replacement=lambda original, session: partial(session.create_task_optimizer, original),
        loop=TASKS,
    ),
    Seam(
        TRAIN, "get_learning_rate",
        why="the loop logs the largest rate of all groups, which may be the temperature's",
        contract="train_one_epoch logs get_learning_rate(optimizer)",
        replacement=lambda original, session: partial(session.model_rate, original),
        for_ext_loss=True,
        for_components=True,
        loop=TASKS,
    ),
    Seam(
        "open_clip_train.file_utils", "pt_load",
        why="takes our state out of the checkpoint before OpenCLIP loads the optimizer",
        contract="load_checkpoint imports pt_load and reads --resume by pt_load(path, map_location=), before main "
        "creates the data; the model's names are those of the model without wrappers",
        replacement=lambda original, session: session.load_checkpoint,
        loop=TASKS,
    ),
    Seam(
        MAIN, "save_checkpoint",
        why="our state is saved with the optimizer's",
        contract="main calls save_checkpoint(task, optimizer, ...) after each epoch and writes what it returns, a dict "
        "with optimizer, on process 0",
        replacement=lambda original, session: partial(session.save_checkpoint, original),
        for_ext_loss=True,
        loop=TASKS,
    ),
    Seam(
        MAIN, "save_sharded_checkpoint",
        why="our state is saved in the folder of the shards",
        contract="main calls save_sharded_checkpoint(task, optimizer, folder, ...) on every process; the folder is a "
        "checkpoint once its file .metadata is there",
        replacement=lambda original, session: partial(session.save_sharded, original),
        for_ext_loss=True,
        loop=TASKS,
    ),
    Seam(
        MAIN, "load_sharded_checkpoint",
        why="our state is loaded from the folder of the shards",
        contract="main loads a folder of --resume by load_sharded_checkpoint(task, folder, ...), which returns the "
        "epochs that are done, before it creates the data",
        replacement=lambda original, session: partial(session.load_sharded, original),
        for_ext_loss=True,
        loop=TASKS,
    ),
    Seam(
        MAIN, "train_one_epoch",
        why="schedules by epoch, seeds by epoch, gathering the state that only some processes hold; before the first "
        "epoch the loss itself, and the recovery of statistics, which is this same epoch at learning rate 0",
        contract="called once per epoch as (state, data, args, tb_writer=) before the state's optimizer is saved; "
        "takes the epoch's number, task, optimizer, scaler and scheduler from the state and counts in it; enumerates "
        "data['train'].dataloader, calls set_epoch of data['train'] and scheduler(step), and gives the numbers of a "
        "step, on those of --log-metric-every-n-steps, too, to tb_writer.add_scalar('train/' + name, number, step); of "
        "the losses it takes what items() gives, on every process",
        replacement=lambda original, session: partial(session.train_state, original),
        loop=TASKS,
    ),
)
