#!/usr/bin/env python3
"""Language models of random weights, and what they compute, in plain float64.

    reference.py <case> <folder>

writes a checkpoint as transformers lays it out (`config.json`,
`model.safetensors`) and `cases.safetensors`: for the functions `prefill`,
`prefill_packed` and `decode` of the program made of it, the inputs, under
`<function>.<input>`, and the expected results, under `<function>.<result>.out`.
The options that give them to corey-run are in `<function>.args`.

The sums are written as the definitions say, token by token, on lists: nothing
is shared with the compiler, nor with any library.
"""

import json
import math
import os
import random
import struct
import sys

COMMON = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "vocab_size": 40,
    "state_size": 8,
    "conv_kernel": 4,
    "expand": 2,
    "hidden_act": "silu",
    "layer_norm_epsilon": 1e-5,
    "residual_in_fp32": True,
    "use_bias": False,
    "use_conv_bias": True,
    "tie_word_embeddings": True,
    "eos_token_id": 0,
}
MAMBA = {**COMMON, "model_type": "mamba", "time_step_rank": 3}
FALCON = {
    **COMMON,
    "model_type": "falcon_mamba",
    "time_step_rank": 5,
    "mixer_rms_eps": 1e-3,
}
MAMBA2 = {
    **COMMON,
    "model_type": "mamba2",
    "num_heads": 6,
    "head_dim": 8,
    "n_groups": 1,
    "chunk_size": 256,
    "rms_norm": True,
    "time_step_limit": [0.0, float("inf")],
}
# The configuration, and the type of the weights.
CASES = {
    "mamba": (MAMBA, "F32"),
    "mamba-other": (
        {
            **MAMBA,
            "use_bias": True,
            "use_conv_bias": False,
            "tie_word_embeddings": False,
            "residual_in_fp32": False,
            "conv_kernel": 3,
            "intermediate_size": 40,
            "time_step_rank": "auto",
            "layer_norm_epsilon": 1e-2,
        },
        "BF16",
    ),
    "mamba2": (MAMBA2, "F32"),
    "mamba2-other": (
        {
            **MAMBA2,
            "use_bias": True,
            "use_conv_bias": False,
            "tie_word_embeddings": False,
            "residual_in_fp32": False,
            "conv_kernel": 2,
            "n_groups": 3,
            "time_step_limit": [0.05, 0.4],
            "layer_norm_epsilon": 1e-2,
        },
        "F16",
    ),
    "falcon_mamba": (FALCON, "F32"),
    "falcon_mamba-other": (
        {
            **FALCON,
            "use_bias": True,
            "tie_word_embeddings": False,
            # As of the published one: what it expands to is what the other says.
            "expand": 16,
            "intermediate_size": 48,
        },
        "BF16",
    ),
}


# Tensors: lists of lists, and the type they are stored as.


def stored(value, dtype):
    """`value` as a file of `dtype` has it."""
    if dtype == "F16":
        return struct.unpack("<e", struct.pack("<e", value))[0]
    bits = struct.unpack("<I", struct.pack("<f", value))[0]
    if dtype == "BF16":
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return struct.unpack("<f", struct.pack("<I", bits))[0]


def flat(value):
    if isinstance(value, list):
        return [x for each in value for x in flat(each)]
    return [value]


def shape_of(value):
    return [len(value)] + shape_of(value[0]) if isinstance(value, list) else []


def to_bytes(value, dtype):
    numbers = flat(value)
    if dtype == "BF16":
        words = [struct.unpack("<I", struct.pack("<f", x))[0] >> 16 for x in numbers]
        return struct.pack("<%dH" % len(words), *words)
    code = {"F16": "e", "F32": "f", "F64": "d", "I32": "i", "I64": "q"}[dtype]
    return struct.pack("<%d%s" % (len(numbers), code), *numbers)


def write(path, tensors):
    """`tensors`: name -> (nested lists, dtype)."""
    header, data = {}, b""
    # By size of elements, so that all are aligned.
    order = ["F64", "I64", "F32", "I32", "F16", "BF16"]
    for name, (value, dtype) in sorted(
        tensors.items(), key=lambda item: order.index(item[1][1])
    ):
        encoded = to_bytes(value, dtype)
        header[name] = {
            "dtype": dtype,
            "shape": shape_of(value),
            "data_offsets": [len(data), len(data) + len(encoded)],
        }
        data += encoded
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + data)


# The models.


class Model:
    def __init__(self, config, dtype, seed):
        self.config, self.random = config, random.Random(seed)
        self.is2 = config["model_type"] == "mamba2"
        self.hidden, self.states = config["hidden_size"], config["state_size"]
        self.inner = config["expand"] * self.hidden
        if not self.is2:
            self.inner = config.get("intermediate_size", self.inner)
        self.width = config["conv_kernel"]
        self.rank = config.get("time_step_rank", 0)
        if self.rank == "auto":
            self.rank = math.ceil(self.hidden / 16)
        self.channels = self.inner
        if self.is2:
            self.heads, self.head = config["num_heads"], config["head_dim"]
            self.groups = config["n_groups"]
            self.channels += 2 * self.groups * self.states
        self.weights, self.dtype = {}, dtype
        self.make_weights()

    # Weights.

    def put(self, name, shape, mean=0.0, deviation=1.0):
        def make(shape):
            if not shape:
                return stored(self.random.gauss(mean, deviation), self.dtype)
            return [make(shape[1:]) for _ in range(shape[0])]

        self.weights[name] = make(shape)

    def put_matrix(self, name, rows, columns):
        self.put(name, [rows, columns], 0, columns**-0.5)

    def make_weights(self):
        c = self.config
        self.put("backbone.embeddings.weight", [c["vocab_size"], self.hidden])
        for layer in range(c["num_hidden_layers"]):
            p = "backbone.layers.%d." % layer
            self.put(p + "norm.weight", [self.hidden], 1, 0.2)
            p += "mixer."
            projected = 2 * self.inner
            if self.is2:
                projected = self.inner + self.channels + self.heads
            self.put_matrix(p + "in_proj.weight", projected, self.hidden)
            self.put_matrix(p + "out_proj.weight", self.hidden, self.inner)
            if c["use_bias"]:
                self.put(p + "in_proj.bias", [projected], 0, 0.3)
                self.put(p + "out_proj.bias", [self.hidden], 0, 0.3)
            self.put(p + "conv1d.weight", [self.channels, 1, self.width], 0, 0.5)
            if c["use_conv_bias"]:
                self.put(p + "conv1d.bias", [self.channels], 0, 0.3)
            if self.is2:
                self.put(p + "A_log", [self.heads], 0.5, 0.5)
                self.put(p + "D", [self.heads], 1, 0.3)
                self.put(p + "dt_bias", [self.heads], -1, 1)
                self.put(p + "norm.weight", [self.inner], 1, 0.2)
            else:
                self.put_matrix(
                    p + "x_proj.weight", self.rank + 2 * self.states, self.inner
                )
                self.put_matrix(p + "dt_proj.weight", self.inner, self.rank)
                self.put(p + "dt_proj.bias", [self.inner], -1, 1)
                self.put(p + "A_log", [self.inner, self.states], 0.5, 0.5)
                self.put(p + "D", [self.inner], 1, 0.3)
        self.put("backbone.norm_f.weight", [self.hidden], 1, 0.2)
        if not c["tie_word_embeddings"]:
            self.put_matrix("lm_head.weight", c["vocab_size"], self.hidden)

    # States.

    def conv_shape(self):
        return [self.width - 1, self.channels]

    def state_shape(self):
        if self.is2:
            return [self.heads, self.head, self.states]
        return [self.inner, self.states]

    # Computation: one token at a time; `state` is changed.

    def mixer_state(self, p, convolved, rest, state):
        """The scan of one token: y, before the gate."""
        w = self.weights
        u = convolved[: self.inner]
        if self.is2:
            n = self.groups * self.states
            b, c = convolved[self.inner : self.inner + n], convolved[self.inner + n :]
            low, high = self.config["time_step_limit"]
            y = []
            for h in range(self.heads):
                dt = softplus(rest[h] + w[p + "dt_bias"][h])
                dt = min(max(dt, low), high)
                decay = math.exp(-math.exp(w[p + "A_log"][h]) * dt)
                group = h // (self.heads // self.groups) * self.states
                for i in range(self.head):
                    x, s = u[h * self.head + i], state[h][i]
                    for j in range(self.states):
                        s[j] = decay * s[j] + dt * x * b[group + j]
                    y.append(
                        sum(s[j] * c[group + j] for j in range(self.states))
                        + w[p + "D"][h] * x
                    )
            return y
        selected = matvec(w[p + "x_proj.weight"], u)
        parts = [
            selected[: self.rank],
            selected[self.rank : self.rank + self.states],
            selected[self.rank + self.states :],
        ]
        if self.config["model_type"] == "falcon_mamba":
            eps = self.config["mixer_rms_eps"]
            parts = [rms_norm(part, [1.0] * len(part), eps) for part in parts]
        low, b, c = parts
        delta = matvec(w[p + "dt_proj.weight"], low)
        y = []
        for d in range(self.inner):
            dt = softplus(delta[d] + w[p + "dt_proj.bias"][d])
            s = state[d]
            for j in range(self.states):
                decay = math.exp(-math.exp(w[p + "A_log"][d][j]) * dt)
                s[j] = decay * s[j] + dt * b[j] * u[d]
            y.append(
                sum(s[j] * c[j] for j in range(self.states)) + w[p + "D"][d] * u[d]
            )
        return y

    def mixer(self, p, x, conv, state):
        w, bias = self.weights, self.config["use_bias"]
        all = matvec(w[p + "in_proj.weight"], x)
        if bias:
            all = add(all, w[p + "in_proj.bias"])
        if self.is2:
            gate = all[: self.inner]
            taken = all[self.inner : self.inner + self.channels]
            rest = all[self.inner + self.channels :]
        else:
            taken, gate, rest = all[: self.inner], all[self.inner :], None
        window = conv + [taken]
        convolved = []
        for d in range(self.channels):
            value = sum(
                w[p + "conv1d.weight"][d][0][k] * window[k][d]
                for k in range(self.width)
            )
            if self.config["use_conv_bias"]:
                value += w[p + "conv1d.bias"][d]
            convolved.append(silu(value))
        conv[:] = window[1:]
        y = self.mixer_state(p, convolved, rest, state)
        y = [a * silu(g) for a, g in zip(y, gate)]
        if self.is2:
            # Each group by itself, as in mamba_ssm.
            weight, n = w[p + "norm.weight"], self.inner // self.groups
            parts = [slice(n * g, n * (g + 1)) for g in range(self.groups)]
            eps = self.config["layer_norm_epsilon"]
            y = sum((rms_norm(y[part], weight[part], eps) for part in parts), [])
        y = matvec(w[p + "out_proj.weight"], y)
        return add(y, w[p + "out_proj.bias"]) if bias else y

    def run(self, ids, states):
        """Logits of every token; `states`: of each layer conv and scan."""
        w, eps = self.weights, self.config["layer_norm_epsilon"]
        head = w.get("lm_head.weight", w["backbone.embeddings.weight"])
        logits = []
        for token in ids:
            x = w["backbone.embeddings.weight"][token]
            for layer, (conv, state) in enumerate(states):
                p = "backbone.layers.%d." % layer
                normed = rms_norm(x, w[p + "norm.weight"], eps)
                x = add(x, self.mixer(p + "mixer.", normed, conv, state))
            x = rms_norm(x, w["backbone.norm_f.weight"], eps)
            logits.append(matvec(head, x))
        return logits


def matvec(matrix, x):
    return [math.fsum(a * b for a, b in zip(row, x)) for row in matrix]


def add(a, b):
    return [x + y for x, y in zip(a, b)]


def silu(x):
    return x / (1 + math.exp(-x))


def softplus(x):
    return max(x, 0) + math.log1p(math.exp(-abs(x)))


def rms_norm(x, weight, eps):
    scale = (math.fsum(v * v for v in x) / len(x) + eps) ** -0.5
    return [v * scale * g for v, g in zip(x, weight)]


# Cases.


def copy(value):
    return [copy(each) for each in value] if isinstance(value, list) else value


def main():
    name, folder = sys.argv[1:]
    config, dtype = CASES[name]
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, "config.json"), "w") as file:
        json.dump(config, file, indent=2)
    model = Model(config, dtype, seed=name)
    write(
        os.path.join(folder, "model.safetensors"),
        {key: (value, dtype) for key, value in model.weights.items()},
    )

    rng, tensors = model.random, {}
    num_slots = 6

    def pool(shape):
        def make(shape):
            if not shape:
                return stored(rng.gauss(0, 0.5), "F32")
            return [make(shape[1:]) for _ in range(shape[0])]

        return make([num_slots] + shape)

    def sequence(length):
        return [rng.randrange(config["vocab_size"]) for _ in range(length)]

    layers = range(config["num_hidden_layers"])
    for function, sequences, slots in [
        ("prefill", [sequence(11), sequence(11)], [4, 1]),
        # A negative slot begins with zeros and leaves nothing.
        ("prefill_packed", [sequence(7), sequence(1), sequence(70)], [5, -1, 2]),
        ("decode", [[id] for id in sequence(4)], [3, 0, -1, 5]),
    ]:
        pools = [(pool(model.conv_shape()), pool(model.state_shape())) for _ in layers]
        given = copy([list(each) for each in pools])
        zeros = [
            [[0.0] * model.channels for _ in range(model.width - 1)],
            copy([[0.0] * model.states] * model.inner),
        ]
        if model.is2:
            zeros[1] = copy([[[0.0] * model.states] * model.head] * model.heads)
        logits = []
        for ids, slot in zip(sequences, slots):
            if slot < 0:
                states = [copy(zeros) for _ in layers]
            else:
                states = [(conv[slot], scan[slot]) for conv, scan in pools]
            logits += model.run(ids, states)
        ids = sequences
        if function == "prefill_packed":
            ids = [sum(sequences, [])]
            starts = [sum(map(len, sequences[:i])) for i in range(len(sequences))]
            tensors[function + ".starts"] = (starts, "I32")
        tensors[function + ".ids"] = (ids, "I32")
        tensors[function + ".slots"] = (slots, "I32")
        if function == "decode":
            best = [[row.index(max(row))] for row in logits]
            tensors[function + ".next.out"] = (best, "I32")
            # No temperature: whatever else there is, the most likely token.
            batch = range(len(best))
            random = [[7, row, 5 - row] for row in batch]
            after = [[seed, row, draws + 1] for seed, row, draws in random]
            tensors[function + ".temperature"] = ([0.0 for _ in batch], "F32")
            tensors[function + ".top_k"] = ([2 for _ in batch], "I32")
            tensors[function + ".top_p"] = ([0.5 for _ in batch], "F32")
            tensors[function + ".random"] = (random, "I64")
            tensors[function + ".next_random.out"] = (after, "I64")
        else:
            # In no order, and one twice.
            rows = [len(logits) - 1, 3, 0, 10, 3]
            tensors[function + ".rows"] = (rows, "I32")
            logits = [logits[row] for row in rows]
        tensors[function + ".logits.out"] = (logits, "F64")
        for layer in layers:
            for index, kind in enumerate(["conv_state", "ssm_state"]):
                key = "%s.%s.%d" % (function, kind, layer)
                tensors[key] = (given[layer][index], "F32")
                tensors[key + ".out"] = (pools[layer][index], "F64")
    path = os.path.join(folder, "cases.safetensors")
    write(path, tensors)
    for function in ["prefill", "prefill_packed", "decode"]:
        with open(os.path.join(folder, function + ".args"), "w") as file:
            file.write("--function %s\n" % function)
            for key in tensors:
                if key.startswith(function + "."):
                    name = key[len(function) + 1 :]
                    option = "check" if name.endswith(".out") else "input"
                    name = name[:-4] if option == "check" else name
                    file.write("--%s %s=%s:%s\n" % (option, name, path, key))


main()
