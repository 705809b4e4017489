"""Generated scenes as data, and their zero-shot classification during training, as OpenCLIP has it for ImageNet."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from open_clip_ext.options import option
from training_ext.core.component import Component
from training_ext.core.epoch import Evaluation
from training_ext.core.hosts.both import GET_DATASET_FN
from training_ext.core.seam import DATA, TRAIN_DATA, VAL_DATA, Seam
from training_ext.data.metrics import SCENES, is_due


def generated(scope: str) -> Seam:
    return Seam(
        DATA, "SyntheticDataset",
        why="generated scenes stand in for it",
        contract="get_synthetic_dataset builds SyntheticDataset(transform=, image_size=, dataset_size=, tokenizer=)",
        replacement=lambda original, component: component.dataset(scope == TRAIN_DATA),
        used_by=f"{DATA}:get_synthetic_dataset",
        scopes=(scope,),
        layer=-1,
    )  # fmt: skip


class GeneratedScenes(Component):
    """The data of `--dataset-type shapes`, and zero-shot classification of the validation scenes."""

    name = "scenes"
    topic = "data"
    condition = "--dataset-type shapes"

    shapes_seed: int | None = option(
        None, "seed of the scenes of --dataset-type shapes (default: 0)",
        valid=lambda seed: 0 <= seed < 2**63, expected="at least 0 and below 2**63",
    )  # fmt: skip
    shapes_shifted: bool = option(
        False, "train on scenes in other colours and with noisy captions; the validation scenes are the same"
    )

    seams = (
        replace(
            GET_DATASET_FN,
            why="builds generated scenes as OpenCLIP's synthetic data",
            replacement=lambda original, _: lambda path, kind: original(
                path, "synthetic" if kind == "shapes" else kind
            ),
            layer=-1,
        ),
        generated(TRAIN_DATA),
        generated(VAL_DATA),
    )  # fmt: skip

    def wanted(self) -> bool:
        return self.args.dataset_type == "shapes"

    def metrics(self) -> Sequence[str]:
        return (SCENES,) if self.args.val_data else ()

    def dataset(self, is_train: bool) -> Callable:
        """Replaces OpenCLIP's `SyntheticDataset`."""
        from training_ext.data.scenes import shapes_dataset

        return partial(shapes_dataset, self.args, is_train)

    def scores(self, evaluation: Evaluation) -> dict[str, float]:
        if self.plan.shards_model or "val" not in evaluation.data or not is_due(self.args, evaluation.epoch):
            return {}
        from training_ext.components.scenes.classification import classify_scenes

        return classify_scenes(evaluation.model, evaluation.data["val"].dataloader, self.args, evaluation.tokenizer)
