"""A few chats in ShareGPT's form, a tokenizer of one token a word, and stub servers."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestServer
from stub_openai import StubServer

WORDS = ("time", "people", "water", "light", "energy", "system", "model", "data", "story", "river", "city", "music")
NUM_CHATS = 60


def sentence(num_words: int, start: int) -> str:
    return " ".join(WORDS[(start + i * 7) % len(WORDS)] for i in range(num_words))


@pytest.fixture(scope="session")
def chats_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ShareGPT file: prompts of 3 to 300 words and replies of 2 to 120, all four classes at a scale of 0.25."""
    rows = []
    for i in range(NUM_CHATS):
        prompt = sentence(200 + i if i % 3 == 0 else 3 + i, i)
        reply = sentence(60 + i if i % 2 == 0 else 2 + i % 20, i + 1)
        turns = [{"from": "human", "value": prompt}, {"from": "gpt", "value": reply}]
        rows.append({"id": f"chat{i}_0", "conversations": turns})
    path = tmp_path_factory.mktemp("chats") / "chats.json"
    path.write_text(json.dumps(rows))
    return path


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a word-level tokenizer (one token a word) and a context of 512."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("model") / "tiny-words"
    folder.mkdir()
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(["[UNK]", *WORDS])}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 512}))
    return folder


@pytest.fixture
async def stub() -> AsyncIterator[Any]:
    """Start stub servers: `url = await stub(StubServer(...))`."""
    servers: list[TestServer] = []

    async def start(server: StubServer) -> str:
        running = TestServer(server.app(), shutdown_timeout=0.1)
        await running.start_server()
        servers.append(running)
        return str(running.make_url("")).rstrip("/")

    yield start
    for running in servers:
        await running.close()
