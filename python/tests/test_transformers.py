"""Models of transformers: patched, and as a whole."""

import pathlib
import warnings

import numpy as np
import pytest
import references as ref

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import corey

try:
    from corey.integrations.transformers import _module, patch, stats, unpatch

    _module("mamba")
except NotImplementedError as failure:
    pytest.skip(str(failure), allow_module_level=True)

CHECKPOINTS = pathlib.Path(__file__).parents[2] / "test" / "Inputs" / "checkpoints"
DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])


def mamba(**options):
    return transformers.MambaForCausalLM(transformers.MambaConfig(
        **{**dict(vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=8), **options}))  # fmt: skip


def mamba2(**options):
    return transformers.Mamba2ForCausalLM(transformers.Mamba2Config(
        **{**dict(vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=16, num_heads=8, head_dim=8, n_groups=2,
                  chunk_size=8), **options}))  # fmt: skip


def falcon_mamba(**options):
    return transformers.FalconMambaForCausalLM(transformers.FalconMambaConfig(
        **{**dict(vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=8), **options}))  # fmt: skip


MODELS = {
    "mamba": mamba,
    "mamba, biases": lambda: mamba(use_bias=True, hidden_size=24, state_size=4),
    "mamba2": mamba2,
    "mamba2, one group": lambda: mamba2(n_groups=1, head_dim=4, num_heads=16),
    "falcon_mamba": falcon_mamba,
    "mamba1-tiny": lambda: transformers.AutoModelForCausalLM.from_pretrained(CHECKPOINTS / "mamba1-tiny", dtype=torch.float32),
    "mamba2-tiny": lambda: transformers.AutoModelForCausalLM.from_pretrained(CHECKPOINTS / "mamba2-tiny", dtype=torch.float32),
}


@pytest.fixture(params=list(MODELS))
def model(request):
    torch.manual_seed(5)
    made = MODELS[request.param]().eval()
    yield made
    unpatch(made)


def tokens(batch=2, length=21):
    return torch.randint(1, 60, (batch, length), generator=torch.Generator().manual_seed(6))


@pytest.mark.parametrize("device", DEVICES)
def test_patched_models_compute_the_same(model, device):
    model, ids = model.to(device), tokens().to(device)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error", corey.integrations.transformers.Refused)
        wanted = model(ids).logits
        text = model.generate(ids, max_new_tokens=6, do_sample=False)
        patch(model)
        assert ref.error(model(ids).logits, wanted) < 1e-4
        assert torch.equal(model.generate(ids, max_new_tokens=6, do_sample=False), text)
        layers = model.config.num_hidden_layers
        rows = {row["function"]: row for row in stats(model)}
        assert all(row["transformers"] == 0 for row in rows.values())
        # The prompt twice, and five tokens more.
        scan = rows.get("mamba_selective_scan") or rows["mamba2_chunk_scan"]
        step = rows.get("mamba_selective_state_update") or rows["mamba2_selective_state_update"]
        assert scan["corey"] == 2 * layers and step["corey"] == 5 * layers
        unpatch(model)
        assert torch.equal(model(ids).logits, wanted) and len(stats(model)) == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("layers", [2, 16])
@pytest.mark.parametrize("make", [mamba, mamba2, falcon_mamba])
def test_half_precision_is_no_worse(make, layers, dtype):
    """Both are compared with the same weights in float32: what a model of many layers
    loses in 16 bits is transformers' own."""
    torch.manual_seed(5)
    half = make(num_hidden_layers=layers).eval().to(dtype)
    ids = tokens(length=7)
    with torch.no_grad():
        theirs = half(ids).logits
        ours = patch(half)(ids).logits
        unpatch(half)
        wanted = half.float()(ids).logits
    assert torch.isfinite(theirs).all() and torch.isfinite(ours).all()
    assert ref.error(ours, wanted) < 1.5 * ref.error(theirs, wanted)


def test_masked_prompts(model):
    ids = tokens()
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    with torch.no_grad():
        wanted = model(ids, attention_mask=mask).logits
        assert ref.error(patch(model)(ids, attention_mask=mask).logits, wanted) < 1e-4


def test_only_the_patched_model_is():
    torch.manual_seed(5)
    one, other = mamba().eval(), mamba().eval()
    patch(one)
    with torch.no_grad():
        other(tokens())
        assert sum(row["corey"] for row in stats()) == 0
        one(tokens())
    assert sum(row["corey"] for row in stats()) == 4
    unpatch(one)


def test_training_has_the_same_gradients():
    torch.manual_seed(5)
    model = mamba2().train()
    ids = tokens(length=9)

    def gradients():
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    wanted = gradients()
    patch(model)
    found = gradients()
    assert sum(row["corey"] for row in stats(model)) == 4
    assert set(found) == set(wanted)
    for name, gradient in wanted.items():
        assert ref.error(found[name], gradient) < 1e-3 or gradient.norm() < 1e-6, name
    unpatch(model)


def test_compile_fullgraph():
    torch.manual_seed(5)
    model = mamba().eval()
    with torch.no_grad():
        wanted = model(tokens(), use_cache=False).logits
        compiled = torch.compile(patch(model), fullgraph=True, backend="aot_eager")
        assert ref.error(compiled(tokens(), use_cache=False).logits, wanted) < 1e-4
    assert sum(row["corey"] for row in stats(model)) == 4
    unpatch(model)


def test_what_is_refused_is_loud(monkeypatch):
    def refuse(*arguments, **options):
        raise NotImplementedError("expected an example, got another")

    torch.manual_seed(5)
    model = mamba().eval()
    monkeypatch.setattr(corey.ops, "selective_scan_fn", refuse)
    with torch.no_grad():
        wanted = model(tokens()).logits
        patch(model)
        with pytest.warns(corey.integrations.transformers.Refused, match="expected an example, got another"):
            assert ref.error(model(tokens()).logits, wanted) < 1e-4
    row = next(row for row in stats(model) if row["function"] == "mamba_selective_scan")
    assert (row["corey"], row["transformers"]) == (0, 2)
    unpatch(model)
    with pytest.raises(TypeError, match="expected one of type mamba, falcon_mamba, mamba2, got Linear"):
        patch(torch.nn.Linear(2, 2))


def test_whole_models(model):
    ids = tokens(batch=1)
    gated = [m for m in model.modules() if type(m).__name__.endswith("RMSNormGated")]
    if getattr(model.config, "n_groups", 1) > 1 and not hasattr(gated[0], "group_size"):
        with pytest.raises(NotImplementedError, match="expected a norm over each of 2 groups of channels, got one over all"):
            corey.load(model)
        return
    loaded = corey.load(model)
    with torch.no_grad():
        wanted = model(ids).logits[0]
        text = model.generate(ids, max_new_tokens=6, do_sample=False, eos_token_id=None)[0, ids.shape[1] :]
    assert ref.error(np.asarray(loaded.logits(ids[0].tolist())), wanted) < 1e-4
    assert loaded.generate(ids[0].tolist(), max_tokens=6, stop_tokens=[]) == text.tolist()
