"""Let processes wait for one another for two hours, not torch's ten minutes, while process 0 counts or evaluates."""

from datetime import timedelta
from functools import partial

from training_ext.core.component import Component
from training_ext.core.seam import Seam

HOURS = 2


class ProcessTimeout(Component):
    name = "process_timeout"
    seams = (
        Seam(
            "open_clip_train.distributed", "torch.distributed.init_process_group",
            why="NCCL ends a training in which process 0 alone counts shards or evaluates for 10 minutes",
            contract="it starts the processes by init_process_group(backend=, init_method=, ...)",
            replacement=lambda original, component: partial(original, timeout=timedelta(hours=HOURS)),
            used_by="open_clip_train.distributed:init_distributed_device",
            parameters=("timeout",),
        ),
    )  # fmt: skip

    def wanted(self) -> bool:
        return self.args.uses_ext_loss
