"""Tiny checkpoints of each architecture, and what Hugging Face transformers (float32, CPU) computes with them.

A case holds two styles of config.json, a manifest that says how to fill the weights, and golden values: logits of one
forward pass over 40 tokens, and 16 tokens of cached greedy decoding after the first 20 with the margin of each choice.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

CASES = Path(__file__).parent / "cases"
NAMES = sorted(path.name for path in CASES.iterdir())
STYLES = ("config.json", "config.v4.json")  # rope as transformers 5 writes it, and as most files on the hub have it


def filled(seed: str, name: str, shape: list[int], base: float, scale: float) -> np.ndarray:
    """base + scale * u, u uniform in [-1, 1) from a generator seeded by the name, rounded to bfloat16."""
    generator = np.random.Generator(np.random.PCG64(zlib.crc32(f"{seed}/{name}".encode())))
    values = base + scale * (2.0 * np.asarray(generator.random(tuple(shape))) - 1.0)
    bits = np.ascontiguousarray(values, dtype=np.float32).reshape(-1).view(np.uint32)
    rounded = (bits + np.uint32(0x8000)) & np.uint32(0xFFFF0000)
    return rounded.view(np.float32).reshape(tuple(shape))


def weights(name: str) -> dict[str, np.ndarray]:
    manifest = json.loads((CASES / name / "manifest.json").read_text())
    return {
        tensor: filled(manifest["seed"], tensor, t["shape"], t["base"], t["scale"])
        for tensor, t in manifest["tensors"].items()
    }


def config(name: str, style: str = STYLES[0]) -> dict:
    return json.loads((CASES / name / style).read_text())


def golden(name: str) -> dict[str, np.ndarray]:
    return load_file(CASES / name / "golden.safetensors")


def write_checkpoint(name: str, folder: Path, style: str = STYLES[0]) -> Path:
    """A folder as the hub has it: config.json and model.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights(name), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config(name, style)))
    return folder
