"""``/v1/embeddings`` through OpenAI's client, against transformers' hidden states."""

from __future__ import annotations

import httpx2
import numpy as np
import openai
import pytest
import torch
from transformers import AutoModel

from ....tiny import SMELT_6M
from ..serving import Serving

TEXTS = ["The city of London", "A much longer story about a river. " * 40]


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_embeddings_are_pooled_hidden_states(pooling: str, server: Serving) -> None:
    """The longer text takes several pieces of the token budget."""
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", _strict_response_validation=True)
    found = client.embeddings.create(
        model="smelt-6m", input=TEXTS, encoding_format="float", extra_body={"pooling": pooling}
    )
    model = AutoModel.from_pretrained(SMELT_6M, dtype=torch.float32)
    encode = next(iter(server.models)).encode
    for text, each in zip(TEXTS, found.data, strict=True):
        with torch.no_grad():
            states = model(torch.tensor([encode(text)])).last_hidden_state[0]
        wanted = states[-1] if pooling == "last" else states.mean(0)
        assert np.allclose(each.embedding, torch.nn.functional.normalize(wanted, dim=0).numpy(), atol=1e-4)
    assert found.usage.prompt_tokens == sum(len(encode(text)) for text in TEXTS)


def test_both_encodings_say_the_same(server: Serving) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    ids = next(iter(server.models)).encode(TEXTS[0])
    plain = client.embeddings.create(model="smelt-6m", input=[ids], encoding_format="float").data[0].embedding
    coded = client.embeddings.create(model="smelt-6m", input=TEXTS[0]).data[0].embedding  # the client asks for base64
    assert np.allclose(plain, coded, atol=1e-6)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": ["a", ""]}, "input"),
        ({"input": [5] * 2000}, "1024"),
        ({"input": [4096]}, "4096"),
        ({"input": "a", "dimensions": 8}, "256 dimensions"),
        ({"input": "a", "encoding_format": "text"}, "encoding_format"),
    ],
)
def test_what_is_wrong_is_said(body: dict[str, object], says: str, server: Serving) -> None:
    found = httpx2.post(f"{server.url}/v1/embeddings", json=body)
    assert found.status_code == 400, found.text
    assert says in found.json()["error"]["message"]
