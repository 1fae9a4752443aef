"""The network: how states are pooled, what the features do, and what a checkpoint keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertModel, DistilBertConfig, DistilBertModel, LlamaConfig, OPTConfig, OPTModel

from pipeline.backbone import load_backbone
from pipeline.network import (
    HEAD_FILE,
    MAX_DEVIATIONS,
    LengthNetwork,
    is_causal,
    load_network,
    predict_logits,
    to_batch,
)
from serving_plugin.core.errors import ConfigurationError
from serving_plugin.predictor.conversation import NUM_FEATURES
from serving_plugin.predictor.encoding import EncodedConversation

NUM_BUCKETS = 6
PAD = 1


def bert(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=32, pad_token_id=PAD, initializer_range=0.5,
    )  # fmt: skip
    return BertModel(config, add_pooling_layer=False).eval()


def opt(seed: int = 0) -> Any:
    """Its states are projected to a width of their own."""
    torch.manual_seed(seed)
    config = OPTConfig(
        vocab_size=40, hidden_size=16, word_embed_proj_dim=8, num_hidden_layers=2, num_attention_heads=2, ffn_dim=32,
        max_position_embeddings=32, pad_token_id=PAD, init_std=0.5,
    )  # fmt: skip
    return OPTModel(config).eval()


def distilbert() -> Any:
    torch.manual_seed(0)
    config = DistilBertConfig(
        vocab_size=40, dim=16, n_layers=1, n_heads=2, hidden_dim=32, max_position_embeddings=32, pad_token_id=PAD
    )
    return DistilBertModel(config).eval()


BACKBONES = {"bert": bert, "opt": opt, "distilbert": distilbert}


def network_on(backbone: Any, use_features: bool = True) -> LengthNetwork:
    torch.manual_seed(1)
    return LengthNetwork(backbone, NUM_BUCKETS, use_features).eval()


def inputs(*rows: tuple[int, ...], seed: int = 0) -> dict[str, torch.Tensor]:
    rng = np.random.default_rng(seed)
    encoded = [EncodedConversation(row, tuple(rng.random(NUM_FEATURES).tolist()), len(row), 0) for row in rows]
    return to_batch(encoded, PAD)


ROWS = ((2, 7, 9, 30, 4), (2, 8), (2, 5, 6, 3))


def head_of(network: LengthNetwork, pooled: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = network.head(torch.cat([pooled, network.features(features)], dim=-1))
    return found


@pytest.mark.parametrize("make", [bert, distilbert], ids=["bert", "distilbert"])
def test_an_encoders_states_are_averaged_over_real_tokens(make: Any) -> None:
    network = network_on(make())
    assert network.is_causal is False
    batch = inputs(*ROWS)
    with torch.inference_mode():
        found = network(**batch)["logits"]
        for i, row in enumerate(ROWS):
            alone = network.backbone(input_ids=torch.tensor([row])).last_hidden_state
            expected = head_of(network, alone.mean(dim=1), batch["features"][i : i + 1])
            torch.testing.assert_close(found[i : i + 1], expected, atol=1e-5, rtol=0)


def test_of_a_causal_backbone_the_last_real_token_counts() -> None:
    network = network_on(opt())
    assert network.is_causal is True
    batch = inputs(*ROWS)
    with torch.inference_mode():
        found = network(**batch)["logits"]
        for i, row in enumerate(ROWS):
            alone = network.backbone(input_ids=torch.tensor([row])).last_hidden_state
            expected = head_of(network, alone[:, -1], batch["features"][i : i + 1])
            torch.testing.assert_close(found[i : i + 1], expected, atol=1e-5, rtol=0)


def test_a_loaded_backbone_drops_no_attention_and_keeps_its_other_dropout(tmp_path: Path) -> None:
    bert().save_pretrained(tmp_path)
    loaded = load_backbone(str(tmp_path)).train()
    rates = {name: module.p for name, module in loaded.named_modules() if isinstance(module, torch.nn.Dropout)}
    assert {rate for name, rate in rates.items() if "attention.self" in name} <= {0.0}
    assert {rate for name, rate in rates.items() if "attention.self" not in name} == {0.1}
    assert loaded.config.attention_probs_dropout_prob == 0.0


@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_head_dropout_acts_in_training_alone(rate: float) -> None:
    network = LengthNetwork(bert(), NUM_BUCKETS, True, rate)
    batch = inputs(*ROWS)
    pooled = network.eval().pooled(batch["input_ids"], batch["attention_mask"])
    served = [network.logits_of(pooled, batch["features"]) for _ in range(2)]
    network.head.train()
    trained = [network.logits_of(pooled, batch["features"]) for _ in range(2)]
    assert torch.equal(*served)
    assert torch.equal(*trained) == (rate == 0.0)


def test_the_last_token_is_found_by_the_mask_even_if_it_is_the_padding_id() -> None:
    network = network_on(opt())
    with torch.inference_mode():
        spelt, cut = (network(**inputs(row))["logits"] for row in ((2, 7, PAD), (2, 7)))
    assert not torch.allclose(spelt, cut, atol=1e-3)


@pytest.mark.parametrize("make", BACKBONES.values(), ids=BACKBONES)
def test_padding_changes_nothing(make: Any) -> None:
    network = network_on(make())
    batch = inputs(*ROWS)
    wider = {
        "input_ids": torch.nn.functional.pad(batch["input_ids"], (0, 9), value=PAD),
        "attention_mask": torch.nn.functional.pad(batch["attention_mask"], (0, 9), value=0),
        "features": batch["features"],
    }
    other = {**wider, "input_ids": torch.where(wider["attention_mask"] == 1, wider["input_ids"], 17)}
    with torch.inference_mode():
        plain, padded, filled = (network(**one)["logits"] for one in (batch, wider, other))
    torch.testing.assert_close(padded, plain, atol=1e-5, rtol=0)
    torch.testing.assert_close(filled, plain, atol=1e-5, rtol=0)


@pytest.mark.parametrize("use_features", [True, False])
def test_features_count_or_do_not_also_after_save_and_load(use_features: bool, tmp_path: Path) -> None:
    network = network_on(bert(), use_features)
    batch = inputs(*ROWS)
    network.start_from((1 / NUM_BUCKETS,) * NUM_BUCKETS, batch["features"])
    network.save(tmp_path)
    changed = {**batch, "features": batch["features"] * 3 + 1}
    for one in (network, load_network(tmp_path, NUM_BUCKETS)):
        with torch.inference_mode():
            same = torch.equal(one(**batch)["logits"], one(**changed)["logits"])
        assert same is not use_features


@pytest.mark.parametrize("use_features", [True, False])
def test_features_have_a_gradient_only_where_they_count(use_features: bool) -> None:
    batch = inputs(*ROWS)
    batch["features"].requires_grad_(True)
    network_on(bert(), use_features)(**batch)["logits"].sum().backward()
    gradient = batch["features"].grad
    assert gradient is not None
    assert bool((gradient != 0).any()) is use_features


def test_training_begins_at_the_marginal_distribution() -> None:
    network = network_on(opt())
    shares = (0.5, 0.2, 0.15, 0.1, 0.05, 0.0)
    with torch.inference_mode():
        before = torch.softmax(network(**inputs(*ROWS))["logits"], dim=-1)
        network.start_from(shares, inputs(*ROWS)["features"])
        after = torch.softmax(network(**inputs(*ROWS))["logits"], dim=-1)
    error = (after - torch.tensor(shares)).abs().max().item()
    assert error < 0.05
    assert error < (before - torch.tensor(shares)).abs().max().item() / 3
    assert after.min() > 0  # a bucket that never came in training is unlikely, not impossible


def test_features_are_read_as_deviations_of_the_training_rows(tmp_path: Path) -> None:
    """The same network on features in other units, learnt from rows in those units, says the same."""
    rows = torch.rand((50, NUM_FEATURES), generator=torch.Generator().manual_seed(2)) * 20
    shares = (1 / NUM_BUCKETS,) * NUM_BUCKETS
    plain, scaled = network_on(bert()), network_on(bert())
    plain.start_from(shares, rows)
    scaled.start_from(shares, 7 * rows + 3)
    scaled.save(tmp_path)
    batch = inputs(*ROWS)
    features = batch.pop("features") * 20
    with torch.inference_mode():
        expected = plain(**batch, features=features)["logits"]
        for network in (scaled, load_network(tmp_path, NUM_BUCKETS)):
            found, raw = (network(**batch, features=one)["logits"] for one in (7 * features + 3, features))
            error = (found - expected).abs().max()
            assert error < 1e-3 and error < (raw - expected).abs().max() / 30  # 0.01 joins the deviation


def test_an_outlier_counts_as_the_edge_of_what_was_seen() -> None:
    rows = torch.rand((50, NUM_FEATURES), generator=torch.Generator().manual_seed(2))
    network = network_on(bert())
    network.start_from((1 / NUM_BUCKETS,) * NUM_BUCKETS, rows)
    batch = inputs(*ROWS)
    far = rows.mean(dim=0) + (MAX_DEVIATIONS + 1) * (rows.std(dim=0, correction=0) + 0.01)
    with torch.inference_mode():
        edge, beyond = (network(**{**batch, "features": batch["features"] * 0 + f})["logits"] for f in (far, far * 1e6))
    assert torch.equal(edge, beyond)


def test_a_feature_that_never_varied_stays_a_number() -> None:
    network = network_on(bert())
    network.start_from((1 / NUM_BUCKETS,) * NUM_BUCKETS, torch.zeros((1, NUM_FEATURES)))
    with torch.inference_mode():
        assert torch.isfinite(network(**inputs(*ROWS))["logits"]).all()


@pytest.mark.parametrize("make", BACKBONES.values(), ids=BACKBONES)
def test_save_and_load_round_trip(make: Any, tmp_path: Path) -> None:
    network = network_on(make())
    network.save(tmp_path)
    torch.manual_seed(99)  # a fresh head would be another
    again = load_network(tmp_path, NUM_BUCKETS)
    assert not again.training
    assert again.is_causal == network.is_causal
    first, second = network.state_dict(), again.state_dict()
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    with torch.inference_mode():
        assert torch.equal(network(**inputs(*ROWS))["logits"], again(**inputs(*ROWS))["logits"])


def test_another_number_of_buckets_is_refused_in_one_line(tmp_path: Path) -> None:
    network_on(bert()).save(tmp_path)
    with pytest.raises(ConfigurationError, match=r"does not fit predictor\.json.*dvc repro train") as caught:
        load_network(tmp_path, NUM_BUCKETS + 1)
    assert "\n" not in str(caught.value)


def test_a_folder_without_a_head_is_refused(tmp_path: Path) -> None:
    network_on(bert()).save(tmp_path)
    (tmp_path / HEAD_FILE).unlink()
    with pytest.raises(ConfigurationError, match=r"head\.safetensors is missing"):
        load_network(tmp_path, NUM_BUCKETS)


@pytest.mark.parametrize(
    ("config", "expected"),
    [(BertConfig(), False), (DistilBertConfig(), False), (OPTConfig(), True), (LlamaConfig(), True)],
    ids=["bert", "distilbert", "opt", "llama"],
)
def test_which_backbones_are_causal(config: Any, expected: bool) -> None:
    assert is_causal(config) is expected


def test_logits_come_in_the_order_of_the_rows_whatever_the_batch() -> None:
    rng = np.random.default_rng(0)
    ids = [tuple(rng.integers(2, 40, rng.integers(1, 20)).tolist()) for _ in range(9)]
    encoded = [EncodedConversation(one, (float(i) / 9,) * NUM_FEATURES, 1, 0) for i, one in enumerate(ids)]
    network = network_on(opt())
    found = predict_logits(network, encoded, PAD, batch_size=4)
    assert found.shape == (9, NUM_BUCKETS)
    alone = np.concatenate([predict_logits(network, [one], PAD) for one in encoded])
    np.testing.assert_allclose(found, alone, atol=1e-5)
