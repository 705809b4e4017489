"""The component token_head: SuperCLIP's loss on any split of a step, resumed, exported, with towers of others."""

import os
from argparse import Namespace
from types import SimpleNamespace

import open_clip
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from ports import free_ports

from open_clip_ext import equations
from training_ext.components.token_head import TokenHead, output_width, padding_of
from training_ext.core.added_losses import PREFIX, add_losses

WEIGHT, WIDTH, WORDS, PADDING, LENGTH, STEPS, BATCH = 0.5, 4, 20, 0, 6, 3, 12


class Tiny(torch.nn.Module):
    """As little of a model of OpenCLIP's as the head needs."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.visual = torch.nn.Linear(5, WIDTH)
        self.visual.output_dim = WIDTH
        self.vocab_size = WORDS
        self.logit_scale = torch.nn.Parameter(torch.zeros(()))

    def forward(self, image, text):
        return {"image_features": self.visual(image)}


def batches():
    """Images and captions of every step; all captions begin with one token, and some have a token twice."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        text = torch.randint(PADDING, 8, (BATCH, LENGTH), generator=generator)
        text[:, 0] = WORDS - 1
        yield torch.randn(BATCH, 5, generator=generator, dtype=torch.float64), text


def add_head(model, accum=1):
    head = TokenHead(Namespace(token_head=WEIGHT, accum_freq=accum))
    head.wrap_model(model)
    add_losses(model, [head])
    return head


def trained(rank=0, world=1, accum=1):
    """Loss and gradients of every step on this process's part of the batch, and the head's state at the end."""
    model = Tiny()
    head = add_head(model, accum)
    model.double()
    steps = []
    for image, text in batches():
        parts = list(zip(image.chunk(world)[rank].chunk(accum), text.chunk(world)[rank].chunk(accum), strict=True))
        model.zero_grad()
        with torch.no_grad():
            first = [model(*part)[f"{PREFIX}token"] for part in parts] if accum > 1 else []
        for number, part in enumerate(parts):
            value = model(*part)[f"{PREFIX}token"]
            value = torch.cat([*first[:number], value, *first[number + 1 :]]).mean()  # as in OpenCLIP's loops
            value.backward()
        gradients = [parameter.grad for parameter in (*model.visual.parameters(), *model.token_head.parameters())]
        if world > 1:
            for tensor in (value.detach_(), *gradients):
                dist.all_reduce(tensor.div_(world))
        steps.append((value.detach(), *gradients))
        head.step_done(len(steps))
    return steps, head.state_dict()["counts"]


def by_equation():
    """The same by the equation, with document frequencies counted by hand."""
    model = Tiny()
    add_head(model)
    model.double()
    df, captions, steps = torch.zeros(WORDS, dtype=torch.float64), 0, []
    for image, text in batches():
        model.zero_grad()
        weights = equations.superclip_weights(df, captions) if captions else torch.ones(WORDS, dtype=torch.float64)
        logits = model.token_head(model.visual(image))
        value = WEIGHT * equations.superclip(logits, text, weights, PADDING)
        value.backward()
        parameters = (*model.visual.parameters(), *model.token_head.parameters())
        steps.append((value.detach(), *(parameter.grad.clone() for parameter in parameters)))
        for caption in text.tolist():
            df[list({*caption} - {PADDING})] += 1
        captions += len(text)
    return steps, torch.cat([df, torch.tensor([captions])]).long()


def assert_same(found, expected):
    assert torch.equal(found[1], expected[1])
    for own, other in zip(found[0], expected[0], strict=True):
        assert all(part.abs().max() > 1e-3 for part in other), "nothing to compare"
        torch.testing.assert_close(own, other, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("accum", [1, 2, 3])
def test_it_is_the_equation_of_the_steps_before(accum):
    assert_same(trained(accum=accum), by_equation())


def one_of_several(rank, world, accum, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    try:
        assert_same(trained(rank, world, accum), by_equation())
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("world, accum", [(2, 2), (3, 1), (4, 3)])
def test_several_processes_have_the_target_of_one(world, accum):
    mp.start_processes(one_of_several, (world, accum, free_ports(1)), nprocs=world, start_method="fork")


def test_evaluation_keeps_and_adds_nothing():
    model = Tiny()
    head = add_head(model)
    model.eval()
    assert list(model(torch.ones(2, 5), torch.ones(2, LENGTH, dtype=torch.long))) == ["image_features"]
    assert not hasattr(head, "_features")


@pytest.mark.parametrize(
    "vision, custom",
    [({"layers": 1, "width": 32, "head_width": 16, "patch_size": 16}, False),
     ({"timm_model_name": "test_vit", "timm_pool": "", "timm_proj": "linear"}, False),
     ({"timm_model_name": "test_vit", "timm_pool": "", "timm_proj": "linear"}, True)],
)  # fmt: skip
def test_towers(vision, custom):
    config = {"embed_dim": 16, "vision_cfg": {"image_size": 160, **vision}}
    config["text_cfg"] = {"context_length": 8, "vocab_size": 30, "width": 8, "heads": 2, "layers": 1}
    kind = open_clip.CustomTextCLIP if custom else open_clip.CLIP
    model = kind(**config, output_dict=True)
    assert output_width(model) == 16 and padding_of(getattr(model, "text", model)) == 0
    add_head(model)
    added = model(torch.rand(2, 3, 160, 160), torch.randint(1, 30, (2, 8)))[f"{PREFIX}token"]
    assert added.isfinite() and added > 0


def test_padding_of_hugging_faces_towers():
    assert padding_of(SimpleNamespace(config=SimpleNamespace(pad_token_id=1))) == 1
    assert padding_of(SimpleNamespace(pad_id=None)) == -1


DATA = "--with token_head --token-head 0.5 --dataset-type synthetic --train-num-samples 16 --workers 0 --lr 1e-2"


@pytest.mark.parametrize("loss", ["clip", "neuclip --npn-prototypes 8"])
def test_a_run_resumes_its_counts_and_exports_the_model(run, loss):
    common = f"{DATA} --loss {loss} --save-frequency 1 --lr-scheduler const"
    whole = run("whole", f"{common} --epochs 2")
    resumed = run("resumed", f"{common} --epochs 2 --resume {whole.path}/checkpoints/epoch_1.pt")
    one, other = (e.checkpoint(2)["open_clip_ext"]["components"]["token_head"]["counts"] for e in (whole, resumed))
    assert one[-1] == 32 and torch.equal(one, other) and "Token_loss" in resumed.log
    weights = whole.path / "weights" / "epoch_2.pt"
    model, trained = open_clip.create_model("ViT-test", pretrained=str(weights)), whole.checkpoint(2)["state_dict"]
    assert all(torch.equal(value, trained[name]) for name, value in model.state_dict().items())
    assert (trained["token_head.weight"] - whole.checkpoint(1)["state_dict"]["token_head.weight"]).abs().max() > 1e-3
