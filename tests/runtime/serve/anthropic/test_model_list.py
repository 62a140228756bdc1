"""``/v1/models`` through Anthropic's client."""

from __future__ import annotations

import anthropic

from ..serving import Serving


def test_models_in_anthropics_form(server: Serving) -> None:
    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, _strict_response_validation=True)
    page = client.models.list()
    assert [model.id for model in page] == ["smelt-6m"]
    found = client.models.retrieve("smelt-6m")
    assert found.max_input_tokens == 1023
    assert found.created_at.year >= 2026
