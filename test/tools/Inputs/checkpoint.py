"""checkpoint.py FOLDER VOCABULARY: a mamba checkpoint of one layer, all zeros.

Every token is as likely as any other, and 0 the first of the likely ones.
"""

import json
import os
import struct
import sys

folder, vocabulary = sys.argv[1], int(sys.argv[2])
hidden, inner, states, rank = 16, 32, 4, 2
mixer = "backbone.layers.0.mixer."
shapes = {
    "backbone.embeddings.weight": [vocabulary, hidden],
    "backbone.layers.0.norm.weight": [hidden],
    mixer + "in_proj.weight": [2 * inner, hidden],
    mixer + "conv1d.weight": [inner, 1, 4],
    mixer + "conv1d.bias": [inner],
    mixer + "x_proj.weight": [rank + 2 * states, inner],
    mixer + "dt_proj.weight": [inner, rank],
    mixer + "dt_proj.bias": [inner],
    mixer + "A_log": [inner, states],
    mixer + "D": [inner],
    mixer + "out_proj.weight": [hidden, inner],
    "backbone.norm_f.weight": [hidden],
}
os.makedirs(folder, exist_ok=True)
with open(os.path.join(folder, "config.json"), "w") as file:
    json.dump(
        {
            "model_type": "mamba",
            "hidden_size": hidden,
            "intermediate_size": inner,
            "num_hidden_layers": 1,
            "state_size": states,
            "time_step_rank": rank,
            "vocab_size": vocabulary,
        },
        file,
    )
header, end = {}, 0
for name, shape in shapes.items():
    size = 4
    for extent in shape:
        size *= extent
    header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [end, end + size]}
    end += size
text = json.dumps(header).encode()
with open(os.path.join(folder, "model.safetensors"), "wb") as file:
    file.write(struct.pack("<Q", len(text)) + text + bytes(end))
