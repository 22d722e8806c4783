"""Train the small RoPE model that `milepost stretch demo` stretches, and write it as package data.

    python scripts/train_demo_model.py --out src/milepost/extend/demo_model

A Llama of 1.2 million parameters reads bytes of the prose corpus in windows of 256, and passkey prompts of up to 64,
then 128, then 256 bytes; both losses count equally. It is trained on one CPU thread; the same seed gives the same model
up to the floating-point order of the machine. `--resume` goes on from the last saved step.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from milepost.data import VOCAB_SIZE, PasskeyDataset, PasskeyTask, WindowDataset, byte_tokenizer, load_corpus

LENGTH = 256
STAGES = ((0.55, 64), (0.75, 128), (1.0, LENGTH))
"""Until which share of the steps passkey prompts have at most how many tokens: retrieval is learned short, then far."""


def batch(dataset: object, step: int, size: int) -> dict[str, torch.Tensor]:
    items = [dataset[step * size + i] for i in range(size)]
    return {key: torch.stack([torch.as_tensor(item[key]) for item in items]) for key in items[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=1300)
    parser.add_argument("--rows", type=int, default=8, help="text windows in a step")
    parser.add_argument("--prompts", type=int, default=8, help="passkey prompts in a step")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--state", type=Path, default=Path("demo-model-state.pt"))
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()

    torch.manual_seed(options.seed)
    corpus = load_corpus("prose")
    task = PasskeyTask.small()
    text = WindowDataset(corpus.train, LENGTH, items=options.steps * options.rows, seed=options.seed)
    items = options.steps * options.prompts * LENGTH // STAGES[0][1]
    keys = {
        length: PasskeyDataset(task, items=items, max_length=length, seed=options.seed) for _, length in STAGES
    }
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=160, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=LENGTH, tie_word_embeddings=True, pad_token_id=256,
        bos_token_id=None, eos_token_id=257, rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.95), weight_decay=0.1)
    first, history = 0, []
    if options.resume and options.state.exists():
        saved = torch.load(options.state)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first, history = saved["step"], saved["history"]

    began = time.time()
    for step in range(first, options.steps):
        warm = min(1.0, (step + 1) / 100)
        for group in optimizer.param_groups:
            group["lr"] = options.lr * warm * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / options.steps)))
        losses = []
        reach = next(length for share, length in STAGES if step < share * options.steps)
        prompts = options.prompts * min(4, LENGTH // reach)
        for dataset, size in ((text, options.rows), (keys[reach], prompts)):
            inputs = batch(dataset, step, size)
            inputs["attention_mask"] = (inputs["input_ids"] != 256).long()
            losses.append(model(**inputs).loss)
        sum(losses).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        history.append([loss.item() for loss in losses])
        if (step + 1) % 50 == 0:
            recent = torch.tensor(history[-50:]).mean(0)
            pace = (time.time() - began) / (step + 1 - first)
            print(f"{step + 1} text {recent[0]:.3f} passkey {recent[1]:.3f} {pace:.2f} s/step", flush=True)
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**state, "step": step + 1, "history": history}, options.state)

    recent = torch.tensor(history[-100:]).mean(0)
    model.half().save_pretrained(options.out)
    byte_tokenizer().save_pretrained(options.out)
    card = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "steps": options.steps,
        "text_loss_nats_per_byte": round(float(recent[0]), 4),
        "passkey_loss_nats_per_byte": round(float(recent[1]), 4),
        "trained_length": LENGTH,
        "corpus": corpus.fingerprint,
        "torch": torch.__version__,
        "seed": options.seed,
    }
    (options.out / "training.json").write_text(json.dumps(card, indent=2) + "\n")


if __name__ == "__main__":
    main()
