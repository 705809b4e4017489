"""Print the memory of a step as `--dry-run` predicts it, and on the pretended GPU, in bytes with weights and moments.

    LD_PRELOAD=LIBRARY python step_memory.py MODEL BATCH_SIZE ACCUM_FREQ CHECKPOINTING
"""

import json
import sys
from argparse import Namespace

import open_clip
import torch
from pretend import prepare

from training_ext.tools.step_memory import model_bytes_of_step


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
        results.append(kept + model_bytes_of_step(model, args, device)[1])
    print(json.dumps(results))


if __name__ == "__main__":
    main()
