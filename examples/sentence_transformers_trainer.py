"""A SentenceTransformer trained on pairs of texts with a loss of this package:
`pip install "sentence-transformers[train]>=6"`, then

    python examples/sentence_transformers_trainer.py --loss fastclip-v3 --epochs 2

It trains a tiny BERT from scratch on generated sentences and their translations into an invented language, on one
process or under torchrun; --resume resumes. For your own model and data, keep Temperature, PairLoss and PairTrainer,
and of transformers_trainer.py WithLoss and LossState; the data set has two columns of texts and each pair's row as
`label`.
"""

import tempfile

import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.modules import Module, Normalize, Pooling, Transformer
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import nn
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast
from transformers_trainer import Recall, WithLoss, parse

from open_clip_ext import create_loss
from open_clip_ext.data import describe_scene
from open_clip_ext.distributed import world_size


class Temperature(Module):
    """Last module of the model: DistributedDataParallel averages its gradient, and checkpoints have it.

    A parameter of the loss would get each process's own part of the gradient, and drift apart.
    """

    config_keys: list[str] = []

    def __init__(self):
        super().__init__()
        self.logit_scale = nn.Parameter(torch.tensor(2.7))  # log(1 / tau)

    def forward(self, features: dict) -> dict:
        return features | {"logit_scale": self.logit_scale.exp()}

    def save(self, output_path, *args, safe_serialization=True, **kwargs):
        self.save_config(output_path)
        self.save_torch_weights(output_path, safe_serialization)

    @classmethod
    def load(cls, model_name_or_path, subfolder="", **kwargs):
        return cls.load_torch_weights(model_name_or_path, subfolder, model=cls())


class PairLoss(nn.Module):
    """A loss from `create_loss` for SentenceTransformerTrainer; labels are the pairs' rows."""

    def __init__(self, model: SentenceTransformer, loss: nn.Module):
        super().__init__()
        self.model = model  # the trainer puts DistributedDataParallel around it, and not around the loss
        self.contrastive_loss = loss

    def forward(self, features, labels):
        first, second = (self.model(texts) for texts in features)
        embeddings = (one["sentence_embedding"] for one in (first, second))
        return self.contrastive_loss(*embeddings, first["logit_scale"], index=labels)


class PairTrainer(WithLoss, SentenceTransformerTrainer):
    """A trainer with a `PairLoss`. Validate by an `evaluator`: other data have no rows in the train data."""


def tiny_model(texts: list[str]) -> SentenceTransformer:
    words = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.train_from_iterator(texts, trainers.WordLevelTrainer(special_tokens=["[PAD]", "[UNK]"]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]")
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128,
        max_position_embeddings=32,
    )
    with tempfile.TemporaryDirectory() as folder:
        BertModel(config).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        encoder = Transformer(folder)
    return SentenceTransformer(modules=[encoder, Pooling(64), Normalize(), Temperature()])


def pairs(num_samples: int, seed: int) -> dict[str, list]:
    """Captions of scenes, and the same spelt backwards, words and letters."""
    captions = [describe_scene(seed, row).caption for row in range(num_samples)]
    return {"anchor": captions, "positive": [caption[::-1] for caption in captions], "label": list(range(num_samples))}


def main(argv: list[str] | None = None) -> PairTrainer:
    given = parse(argv, __doc__.splitlines()[0], out="sentences", epochs=2)
    train, held_out = pairs(given.samples, 0), pairs(500, 1)
    torch.manual_seed(0)
    model = tiny_model(train["anchor"] + train["positive"])  # before the process group, in which only process 0 saves
    settings = SentenceTransformerTrainingArguments(
        given.out, num_train_epochs=given.epochs, per_device_train_batch_size=given.batch_size, learning_rate=1e-3,
        learning_rate_mapping={"logit_scale": 1e-3},  # the temperature's own
        save_strategy="epoch", logging_strategy="epoch", report_to="none",
        use_cpu=not torch.cuda.is_available(),  # without it the processes of torchrun do not find each other
        dataloader_drop_last=True,  # the loss needs the same number of pairs on every process
    )
    loss = create_loss(
        given.loss, num_samples=given.samples, epochs=given.epochs, device=settings.device,
        steps_per_epoch=max(1, given.samples // (given.batch_size * world_size())),
    )
    model[-1].logit_scale.requires_grad_(loss.trains_logit_scale)
    trainer = PairTrainer(
        model, settings, train_dataset=Dataset.from_dict(train), loss=PairLoss(model, loss), contrastive_loss=loss
    )
    texts = [held_out[name] for name in ("anchor", "positive")]
    trainer.add_callback(Recall(lambda model: [model.encode(one, convert_to_tensor=True) for one in texts]))
    trainer.train(resume_from_checkpoint=given.resume)
    return trainer


if __name__ == "__main__":
    main()
