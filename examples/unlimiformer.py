"""Cross-attention over a long memory, to the nearest keys of each head only, as in Unlimiformer.

A small T5 reads 32,768 tokens. Its encoder uses a window; in its decoder each head of each query attends to
the 64 keys with the largest products, found exactly, chunk by chunk. The weights are random, so the answer
means nothing: the script shows that it runs, what it costs, and how close it is to attending to everything.

    python examples/unlimiformer.py [--tokens 32768] [--keys 64]
"""

from __future__ import annotations

import argparse
import resource
import time

import torch
import transformers
from torch import Tensor

import attnbias as ab
from attnbias.integrations import huggingface


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--keys", type=int, default=64)
    given = parser.parse_args()
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=1000, d_model=128, d_kv=32, d_ff=256, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    model = huggingface.attach(transformers.T5ForConditionalGeneration(config).eval())
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # makes attention as sharp as a trained model's
            if name.endswith("EncDecAttention.q.weight"):
                parameter.mul_(40)
    huggingface.set_relation(model.encoder, ab.Window(before=256, after=256))
    document = torch.randint(2, 1000, (1, given.tokens))
    answer = torch.randint(2, 1000, (1, 16))
    began = time.process_time()
    with torch.no_grad():
        memory = model.encoder(input_ids=document)
    print(f"encoder: {given.tokens} tokens through a window in {time.process_time() - began:.1f} s of CPU")
    whole, seconds = decode(model, memory, answer)
    print(f"decoder, all keys: {seconds:.2f} s of CPU")
    for keys in (given.keys // 8, given.keys, given.keys * 8):
        huggingface.set_relation(model, huggingface.NearestKeys(keys), cross=True)
        near, seconds = decode(model, memory, answer)
        error = float((near - whole).norm() / whole.norm())
        print(f"decoder, {keys:4} nearest keys of each head: {seconds:.2f} s of CPU, logits {error:.1%} off")
    began = time.process_time()
    model.generate(encoder_outputs=memory, max_new_tokens=8, do_sample=False)
    print(f"8 tokens generated in {time.process_time() - began:.2f} s of CPU")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    pairs = given.tokens**2 * 4 / 2**30
    print(f"peak memory {peak:.1f} GiB; one head's scores in the encoder would take {pairs:.1f} GiB")


def decode(
    model: transformers.T5ForConditionalGeneration, memory: object, answer: Tensor
) -> tuple[Tensor, float]:
    """Return the logits of an answer, and their CPU time."""
    began = time.process_time()
    with torch.no_grad():
        logits: Tensor = model(encoder_outputs=memory, decoder_input_ids=answer).logits
    return logits, time.process_time() - began


if __name__ == "__main__":
    main()
