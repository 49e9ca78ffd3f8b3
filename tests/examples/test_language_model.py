"""A language model's layers as an encoder, with a tiny model in the place of SmolLM2."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from data_gen.transformers_backend import TransformersBackend
from examples.pretrained import language_model
from examples.pretrained.urgency import UrgencyRecipeConfig, urgency
from predictors.modules.checkpoint import load_checkpoint, save_checkpoint
from predictors.modules.config import PredictorConfig
from predictors.modules.encoder import load_encoder, load_tokenizer, tokenize
from predictors.modules.heads import Heads, LengthHead
from predictors.modules.normalization import Normalization
from predictors.modules.predictor import PromptPredictor
from predictors.runtime import open_runtime
from training.network.inference import predict_prompts

WORDS = ["<|im_end|>", "<|im_start|>", "user", "assistant", "write", "an", "essay", "name", "rivers", "\n"]
PROMPTS = ["write an essay", "name rivers", "name an essay " * 4]


@pytest.fixture
def encoder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=16, hidden_size=16, intermediate_size=16, num_hidden_layers=language_model.LAYERS + 2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=512, pad_token_id=0,
    )  # fmt: skip
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="an"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.add_special_tokens(WORDS[:2])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token=WORDS[0])

    def load(self: Any) -> tuple[Any, Any]:
        torch.manual_seed(0)
        return LlamaForCausalLM(copy.deepcopy(config)), tokenizer

    monkeypatch.setattr(TransformersBackend, "load", load)
    language_model.write_encoder(tmp_path / "encoder", PROMPTS)
    return tmp_path / "encoder"


def test_the_encoder_has_the_first_layers_and_the_chat_template(encoder: Path) -> None:
    loaded, tokenizer = load_encoder(str(encoder)), load_tokenizer(str(encoder))
    assert len(loaded.layers) == language_model.LAYERS
    [ids] = tokenize(tokenizer, ["name rivers"], max_length=64)
    words = [WORDS[number] for number in ids]
    assert words == ["<|im_start|>", "user", "name", "rivers", "<|im_end|>", "<|im_start|>", "assistant"]
    batch = tokenize(tokenizer, PROMPTS, max_length=64)
    states = torch.cat([loaded(torch.from_numpy(ids)[None]).last_hidden_state[0] for ids in batch])
    # 1, or less where the mean is large.
    assert float(states.detach().std(0).max()) == pytest.approx(1.0, abs=0.05)


def test_a_checkpoint_is_whole_again_from_its_trained_weights(encoder: Path, tmp_path: Path) -> None:
    config = PredictorConfig(
        encoder=str(encoder), heads=Heads(length=LengthHead()), max_length=64, pooling=("mean", "last")
    )
    model = PromptPredictor(config, load_encoder(str(encoder)), Normalization(mu_mean=5.0, mu_std=1.0))
    with torch.no_grad():
        weight = model.encoder.layers[-1].mlp.up_proj.weight
        weight += 0.3 * torch.randn(16, 2) @ torch.randn(2, 16)
    record = {"config": {"data": "/a/file", "seed": 1}, "data": {"name": "x"}}
    tokenizer = load_tokenizer(str(encoder))
    save_checkpoint(tmp_path / "whole", model, tokenizer, record)
    language_model.split_checkpoint(tmp_path / "whole", encoder, tmp_path / "trained")
    stored = sum(file.stat().st_size for file in (tmp_path / "trained").iterdir())
    assert stored < (tmp_path / "whole" / "model.safetensors").stat().st_size
    assert "/a/file" not in (tmp_path / "trained" / "training.json").read_text()
    language_model.join_checkpoint(tmp_path / "trained", tmp_path / "joined")
    joined = load_checkpoint(tmp_path / "joined")
    whole = predict_prompts(model.eval(), tokenizer, PROMPTS)
    again = predict_prompts(joined.model, joined.tokenizer, PROMPTS)
    assert np.ptp(whole["mu"]) > 0
    np.testing.assert_allclose(again["mu"], whole["mu"], atol=5e-3)
    np.testing.assert_allclose(again["sigma"], whole["sigma"], atol=5e-3)
    assert language_model.MODEL in joined.config.encoder


@pytest.mark.slow
@pytest.mark.usefixtures("encoder")
def test_an_urgency_predictor_that_nothing_is_certified_for_always_abstains(tmp_path: Path) -> None:
    config = UrgencyRecipeConfig(
        out=str(tmp_path / "urgency"), encoder="smollm2", install=False, train_options=("--stage2.epochs=1",)
    )
    urgency(config)
    folder = tmp_path / "urgency" / "smollm2" / "float32"
    runtime = open_runtime(folder, provider="cpu")
    assert runtime.artifact.manifest.heads == ("urgency",)
    assert runtime.artifact.manifest.abstain_threshold == 1.0  # random states
    [first, second] = runtime.predict(["write an essay", "name rivers"]).urgency
    assert first.sum() == pytest.approx(1.0, abs=1e-4)
    assert np.ptp(first - second) > 0
    made = (folder / "manifest.json").stat().st_mtime_ns
    urgency(config)  # finished steps are kept
    assert (folder / "manifest.json").stat().st_mtime_ns == made


@pytest.mark.slow
def test_the_artifact_of_the_shipped_weights_orders_prompts(tmp_path: Path) -> None:
    language_model.make_artifact(language_model.ArtifactConfig(out=str(tmp_path / "smollm2")))
    runtime = open_runtime(tmp_path / "smollm2" / "artifact", provider="cpu")
    prompts = [
        "Answer yes or no: is 7 a prime number?",
        "Write a long essay on the history of the steam engine.",
    ]
    short, long = runtime.predict(prompts, ["meta-llama/Llama-3.1-8B-Instruct"] * 2).mu
    assert long - short > 2.0
