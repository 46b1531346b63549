#!/usr/bin/env python3
"""Splits a checkpoint's tensors over two files with an index, as transformers
does: shards.py <folder> <new folder> [fault]. A fault is `moved`, a tensor that
the index has in the other file, `lost`, one that is in none, `extra`, one that
the index lacks, or `outside`, a file that is not of the folder."""

import json
import os
import shutil
import struct
import sys

source, target = sys.argv[1:3]
fault = sys.argv[3] if len(sys.argv) > 3 else ""
os.makedirs(target, exist_ok=True)
shutil.copy(os.path.join(source, "config.json"), target)
with open(os.path.join(source, "model.safetensors"), "rb") as file:
    data = file.read()
length = struct.unpack("<Q", data[:8])[0]
header, data = json.loads(data[8 : 8 + length]), data[8 + length :]
files = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
parts, weight_map = [{}, {}], {}
for i, name in enumerate(header):
    parts[i % 2][name] = header[name]
    weight_map[name] = files[i % 2]
name = next(iter(header))
if fault == "moved":
    weight_map[name] = files[1]
if fault == "lost":
    weight_map["other"] = files[1]
if fault == "extra":
    del weight_map[name]
if fault == "outside":
    weight_map[name] = "../" + files[0]
for file, part in zip(files, parts):
    body = b""
    for entry in part.values():
        begin, end = entry["data_offsets"]
        entry["data_offsets"] = [len(body), len(body) + end - begin]
        body += data[begin:end]
    text = json.dumps(part).encode()
    text += b" " * (-len(text) % 8)
    with open(os.path.join(target, file), "wb") as out:
        out.write(struct.pack("<Q", len(text)) + text + body)
with open(os.path.join(target, "model.safetensors.index.json"), "w") as out:
    json.dump({"metadata": {"total_size": len(data)}, "weight_map": weight_map}, out)
