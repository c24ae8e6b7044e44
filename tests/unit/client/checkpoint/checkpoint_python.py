#!/usr/bin/env python3
"""A checkpoint as other tools see it, by the Python package `safetensors` and nothing of ours.

Runs as the worker of `shardctl run` (test_checkpoint_python.sh does that), three times:
  save DIR     train shd-gpt a little, save, load all tensors, form the digest from them as
               docs/protocol.md defines it, compare with shardctl's; write weights for the second
  bf16 DIR     restore weights that safetensors has written, save, compare values
  hub DIR      the same in fp16, split in two files with an index
"""
import base64
import hashlib
import json
import os
import struct
import subprocess
import sys

import numpy as np
from ml_dtypes import bfloat16
from safetensors.numpy import load_file, save_file

BLOCK, ALIGN = 2048, 32


def run(*command):
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} exits with {done.returncode}: {done.stderr}")
    return done.stdout


def expect(what, condition):
    if not condition:
        sys.exit(f"expected: {what}")
    print("ok     ", what)


def load(folder, stem):
    """All tensors of a kind, by the index, as transformers does it."""
    with open(f"{folder}/{stem}.safetensors.index.json", encoding="utf-8") as f:
        files = set(json.load(f)["weight_map"].values())
    tensors = {}
    for name in files:
        tensors.update(load_file(f"{folder}/{name}"))
    return tensors


def pieces(array, offset):
    """Cut where blocks of the tensor's unit end."""
    flat, at = array.reshape(-1), 0
    while at < flat.size:
        n = min(BLOCK - (offset + at) % BLOCK, flat.size - at)
        yield flat[at : at + n]
        at += n


def digest(folder):
    with open(f"{folder}/shardd.json", encoding="utf-8") as f:
        info = json.load(f)
    arrays = [load(folder, stem) for stem in ("model", "optimizer-m", "optimizer-v")]
    sha = hashlib.sha256(b"shardd digest 1\n" + struct.pack("<QQ", info["step"], info["updates"]))
    for unit in info["spec"]["units"]:
        offset = 0
        for tensor in unit["tensors"]:
            name, shape = tensor["name"], tensor["shape"]
            sha.update(name.encode() + b"\0" + struct.pack("<I", len(shape)))
            sha.update(b"".join(struct.pack("<Q", n) for n in shape))
            for kind in arrays:
                array = kind[name]
                assert array.dtype == np.float32 and list(array.shape) == shape, name
                for piece in pieces(array, offset):
                    sha.update(hashlib.sha256(piece.tobytes()).digest())
            offset += (int(np.prod(shape)) + ALIGN - 1) // ALIGN * ALIGN
    return info, sha.hexdigest()


def save(work):
    folder = f"{work}/run"
    run("shd-gpt", "--steps", "3", "--layers", "2", "--dim", "64", "--seq", "32", "--sample", "0")
    saved = json.loads(run("shardctl", "checkpoint", folder, "--json"))
    want = json.loads(run("shardctl", "digest", "--json"))["sha256"]
    info, got = digest(f"{folder}/{saved['name']}")
    expect("the digest from Python's tensors is shardctl's", got == want == saved["sha256"])
    expect("shardd.json has it, and step 3", info["digest"] == want and info["step"] == 3)
    expect("the blob is base64", len(base64.b64decode(info["blob"] or "")) >= 0)
    with open(f"{work}/spec.json", "w", encoding="utf-8") as f:
        json.dump(info["spec"], f)
    weights = load(f"{folder}/{saved['name']}", "model")
    brain = {name: w.astype(bfloat16) for name, w in weights.items()}
    save_file(brain, f"{work}/bf16.safetensors")
    half = {name: w.astype(np.float16) for name, w in weights.items()}
    names = sorted(half)
    os.makedirs(f"{work}/hub", exist_ok=True)
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, members in parts.items():
        save_file({n: half[n] for n in members}, f"{work}/hub/{file}")
    index = {"weight_map": {n: file for file, members in parts.items() for n in members}}
    with open(f"{work}/hub/model.safetensors.index.json", "w", encoding="utf-8") as f:
        json.dump(index, f)


def weights(work, source, convert):
    run("shardctl", "restore", "--weights", f"{work}/{source}", "--spec", f"{work}/spec.json")
    folder = f"{work}/from-{source}"
    saved = json.loads(run("shardctl", "checkpoint", folder, "--json"))
    got = load(f"{folder}/{saved['name']}", "model")
    want = load(f"{work}/run/step-000000000003", "model")
    same = all(np.array_equal(got[n], convert(want[n])) for n in want) and len(got) == len(want)
    expect(f"weights of {source} are the same values", same)
    moments = load(f"{folder}/{saved['name']}", "optimizer-v")
    expect("moments are zero, and the step is 0", saved["step"] == 0 and not any(m.any() for m in moments.values()))


def main():
    what, work = sys.argv[1:3]
    if what == "save":
        save(work)
    elif what == "bf16":
        weights(work, "bf16.safetensors", lambda w: w.astype(bfloat16).astype(np.float32))
    else:
        weights(work, "hub", lambda w: w.astype(np.float16).astype(np.float32))


main()
