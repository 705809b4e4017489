"""Print the memory of a step as `--dry-run` predicts it, and on the pretended GPU, in bytes with weights and moments.

    LD_PRELOAD=LIBRARY python step_memory.py MODEL BATCH_SIZE ACCUM_FREQ CHECKPOINTING
"""

import json
import sys
from argparse import Namespace
from typing import Any

import open_clip
import torch
from pretend import prepare
from torch import Tensor
from torch.nn import functional

from training_ext.flags.step_memory import model_bytes_of_step


def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False,
    **more: Any,
) -> Tensor:
    """The kernels that CUDA has; which of them PyTorch takes it asks of the driver."""
    if mask is None:
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal)[0]
    mask = mask.to(q.dtype).expand(*q.shape[:3], k.shape[2])
    return torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, mask, True, dropout_p, is_causal)[0]


def main() -> None:
    name, batch_size, accum_freq, checkpointing = sys.argv[1:]
    args = Namespace(
        batch_size=int(batch_size), accum_freq=int(accum_freq), precision="amp",
        grad_checkpointing=checkpointing == "True",
    )
    prepare()
    results = []
    for device in ("cpu", "cuda"):
        with torch.device("meta"):
            model = open_clip.create_model(name, precision=args.precision, device="meta", output_dict=True)
        kept = 3 * sum(parameter.nbytes for parameter in model.parameters())
        if device == "cuda":
            functional.scaled_dot_product_attention = attention
        results.append(kept + model_bytes_of_step(model, args, device)[1])
    print(json.dumps(results))


if __name__ == "__main__":
    main()
