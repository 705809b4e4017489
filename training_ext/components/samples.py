"""The rows, keys, captions and order of the samples, and what OpenCLIP's pipeline cannot read."""

from functools import partial
from typing import Any

from open_clip_ext.options import option
from training_ext.core.component import Component
from training_ext.core.hosts import release
from training_ext.core.seam import TRAIN_DATA, VAL_DATA, Seam

DATA = "open_clip_train.data"
SHARDS = f"{DATA}:get_wds_dataset"
HAS_TASKS = release() >= (4, 0)


class SampleFlags(Component):
    name = "samples"
    topic = "data"
    needs_loss = True
    may_be_off = False

    shard_sizes: str | None = option(
        None, "JSON file of samples per shard, by file name or URL, if there is no sizes.json beside the shards",
        metavar="FILE",
    )  # fmt: skip
    same_key: str | None = option(
        None, "column of the csv, or field of the samples' .json in shards: samples with the same entry are not used "
        "as each other's negatives",
        metavar="NAME",
    )  # fmt: skip
    same_caption: bool = option(False, "samples with the same caption are not used as each other's negatives")
    positives: str | None = option(
        None, "column of the csv, or field of the samples' .json in shards: samples with the same entry are one "
        "another's positives; caption: those with the same caption",
        metavar="NAME",
    )  # fmt: skip
    several_captions: bool = option(
        False, "lines of the csv with the same image, or of one .txt in a folder, are one sample, and one of their "
        "captions is drawn each epoch"
    )
    captions_field: str | None = option(
        None, "field of the samples' .json in shards with a list of captions, of which one is drawn each epoch",
        metavar="NAME",
    )  # fmt: skip

    seams = (
        Seam(
            "open_clip_train.main", "get_data",
            why="every process needs the row of every sample before it builds its loader",
            contract="main calls get_data(args, transforms, epoch=, tokenizer=) after start-up of the processes",
            replacement=lambda original, own: partial(own.training.data.get_data, original),
            used_by="open_clip_train.main:main",
            layer=-1,
        ),
        Seam(
            DATA, "SyntheticDataset",
            why="carries the rows; stands in for generated scenes",
            contract="get_synthetic_dataset builds SyntheticDataset(transform=, image_size=, dataset_size=, "
            "tokenizer=)",
            replacement=lambda original, own: own.training.data.synthetic(original),
            used_by=f"{DATA}:get_synthetic_dataset",
            scopes=(TRAIN_DATA, VAL_DATA),
            layer=1,
        ),
        Seam(
            DATA, "CsvDataset",
            why="carries the rows; one image that cannot be read would end the run",
            contract="get_csv_dataset builds CsvDataset(path, ...), whose items are (image, tokens) by line, with the "
            "cells in images and captions",
            replacement=lambda original, own: own.training.data.csv_lines(original),
            used_by=f"{DATA}:get_csv_dataset",
            scopes=(TRAIN_DATA, VAL_DATA),
            layer=1,
        ),
        Seam(
            DATA, "pd.read_csv",
            why="a column of digits is read as numbers, without their leading zeros",
            contract="CsvDataset reads its cells by pd.read_csv(path, sep=)",
            replacement=lambda original, own: partial(own.training.data.read_csv, original),
            used_by=f"{DATA}:CsvDataset.__init__",
            scopes=(TRAIN_DATA, VAL_DATA),
        ),
        Seam(
            DATA, "FilterValidSample" if HAS_TASKS else "filter_no_caption_or_no_image",
            why="counts what it leaves out",
            contract="get_wds_dataset selects the samples that have a caption and an image by this function, or by "
            "what this class builds",
            replacement=lambda original, own: own.training.data.complete(original),
            used_by=SHARDS,
            scopes=(TRAIN_DATA,),
        ),
        Seam(
            DATA, "wds.map_dict" if HAS_TASKS else "wds.decode",
            why="counts what cannot be decoded",
            contract="get_wds_dataset decodes samples by wds.decode(..., handler=), then takes image and caption by "
            "name; from 4.0 on the images of renamed samples by wds.map_dict(image=..., handler=), the only such stage "
            "with a handler",
            replacement=lambda original, own: own.training.data.decode_images(original) if HAS_TASKS
            else own.training.data.decode(original),
            used_by=SHARDS,
            scopes=(TRAIN_DATA,),
            layer=1,
        ),
        Seam(
            DATA, "wds.shuffle",
            why="webdataset seeds its shuffle buffer by time and process number; after the buffer and before decoding, "
            "a resumed epoch drops the samples that it has used",
            contract="get_wds_dataset uses wds.shuffle(bufsize=, initial=) for samples, dicts with txt; the stages "
            "that follow take one sample at a time",
            replacement=lambda original, own: own.seeded("seeded_shuffle", original),
            used_by=SHARDS,
            scopes=(TRAIN_DATA,),
        ),
        Seam(
            DATA, "wds.WebLoader",
            why="loader workers outlive an epoch, and with them the state of their generators; a resumed epoch is "
            "shorter",
            contract="get_wds_dataset builds wds.WebLoader(dataset, ...), whose workers take turns from 0 on with a "
            "batch each, and returns a DataInfo with shared_epoch",
            replacement=lambda original, own: own.seeded("seeded_loader", original),
            used_by=SHARDS,
            scopes=(TRAIN_DATA,),
        ),
        Seam(
            DATA, "ResampledShards2",
            why="its seed comes from the loader's workers, which differ in a resumed run",
            contract="get_wds_dataset builds ResampledShards2(urls, ...), which seeds itself by worker_seed() + epoch",
            replacement=lambda original, own: own.seeded("seeded_shards", original),
            used_by=SHARDS,
            scopes=(TRAIN_DATA,),
        ),
    )  # fmt: skip

    def seeded(self, name: str, original: Any) -> Any:
        """The replacement with a seed, for this package's losses."""
        return getattr(self.training.data, name)(original) if self.args.uses_ext_loss else original

    def end(self, completed: bool) -> None:
        self.training.data.workers.close()
