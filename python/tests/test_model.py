"""Language models: the checkpoints under test/Inputs."""

import pathlib
import threading

import numpy as np
import pytest

import corey

CHECKPOINTS = pathlib.Path(__file__).parents[2] / "test" / "Inputs" / "checkpoints"
PROMPT = "The quick brown fox jumps over"


@pytest.fixture(scope="module", params=["mamba1-tiny", "mamba2-tiny"])
def model(request):
    return corey.load(CHECKPOINTS / request.param)


def likeliest(logits):
    return [int(i) for i in np.asarray(logits).argmax(-1)]


def test_generation_is_prefill_and_decode(model):
    states = model.make_states(1)
    tokens = likeliest(model.prefill(PROMPT, states))
    while len(tokens) < 12:
        tokens += likeliest(model.decode(tokens[-1:], states))
    assert model.generate(PROMPT, max_tokens=12) == bytes(tokens)
    assert model.generate(list(PROMPT.encode()), max_tokens=12) == tokens
    assert states.tokens(0) == len(PROMPT) + 11


def test_logits_agree_with_prefill(model):
    rows = np.asarray(model.logits(PROMPT))
    assert rows.shape == (len(PROMPT), 256)
    for count in (1, 5, len(PROMPT)):
        last = np.asarray(model.prefill(PROMPT[:count], model.make_states(1)))[0]
        assert np.linalg.norm(last - rows[count - 1]) < 1e-4 * np.linalg.norm(last)


def test_likelihoods(model):
    rows = np.asarray(model.logits(PROMPT)).astype("f8")
    rows -= rows.max(-1, keepdims=True)
    logs = rows - np.log(np.exp(rows).sum(-1, keepdims=True))
    wanted = [-logs[t, token] for t, token in enumerate(PROMPT.encode()[1:])]
    assert np.allclose(model.negative_log_likelihoods(PROMPT), wanted, rtol=1e-4, atol=1e-4)


def test_stream(model):
    whole = model.generate(PROMPT, max_tokens=10)
    assert b"".join(model.generate(PROMPT, max_tokens=10, stream=True)) == whole
    prompts = [PROMPT, list(b"int main(")]
    several = model.generate(prompts, max_tokens=6)
    found = [b"", []]
    for number, token in model.generate(prompts, max_tokens=6, stream=True):
        found[number] += token if number == 0 else [token]
    assert found == several


def test_a_stream_that_nobody_reads_ends(model):
    stream = model.generate(PROMPT, max_tokens=100000, stream=True)
    next(stream)
    stream.close()
    # The model is free again.
    assert len(model.generate(PROMPT, max_tokens=2)) == 2
    for _ in model.generate(PROMPT, max_tokens=100000, stream=True):
        break
    assert len(model.generate(PROMPT, max_tokens=2)) == 2


def test_errors_of_a_stream_reach_its_reader(model):
    with pytest.raises(ValueError, match="expected .* got"):
        list(model.generate([[300]], max_tokens=2, stream=True))


def test_sampling_is_seeded(model):
    options = dict(max_tokens=16, temperature=1.0, top_k=20, top_p=0.9)
    first = model.generate(PROMPT, seed=1, **options)
    assert model.generate(PROMPT, seed=1, **options) == first
    assert any(model.generate(PROMPT, seed=seed, **options) != first for seed in (2, 3, 4))
    assert model.generate(PROMPT, max_tokens=8, temperature=0.7, top_k=1) == model.generate(PROMPT, max_tokens=8)


def test_stop_tokens(model):
    whole = model.generate(PROMPT, max_tokens=12)
    stop = whole[4]
    assert model.generate(PROMPT, max_tokens=12, stop_tokens=[stop]) == whole[: whole.index(stop) + 1]


def test_states(model, tmp_path):
    states = model.make_states(2)
    model.prefill([PROMPT, "def f(x):"], states)
    assert len(states) == 2 and states.tokens(1) == 9
    whole = likeliest(model.decode([32, 32], states.clone()))
    assert likeliest(model.decode([32, 32], states.select([1, 0]))) == whole[::-1]
    path = str(tmp_path / "states.safetensors")
    states.save(path)
    assert likeliest(model.decode([32, 32], model.load_states(path))) == whole
    with pytest.raises(IndexError, match="expected one below 2, got 2"):
        states.tokens(2)
    with pytest.raises(ValueError, match="expected"):
        model.decode([1, 2, 3], states)


def test_threads_take_turns(model):
    whole = model.generate(PROMPT, max_tokens=8)
    results = []
    threads = [threading.Thread(target=lambda: results.append(model.generate(PROMPT, max_tokens=8))) for _ in range(3)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert results == [whole] * 3


def test_what_it_says_of_itself(model):
    assert model.info["vocab_size"] == 256 and model.info["dtype"] == "f32"
    assert model.info["type"] in repr(model) and "<td>num_layers</td>" in model._repr_html_()
    assert "prefill" in model.executable.functions
    assert len(model.explain()) > 0


def test_refused(tmp_path):
    with pytest.raises(ValueError, match="config.json"):
        corey.load(tmp_path)
    with pytest.raises(ValueError, match="expected .* got"):
        corey.load(CHECKPOINTS / "mamba1-tiny", dtype="float8")
    with pytest.raises(ValueError, match="expected .* got"):
        corey.load(CHECKPOINTS / "mamba1-tiny", segment=0)
