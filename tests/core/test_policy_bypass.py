import pytest
from core_samples import load, request

from serving_plugin.core.bypass import never, whole_reason


def test_never_splits_everything():
    assert never(request(), [load("d")]) is False
    assert never(request()) is False


def chat(*contents):
    return {"messages": [{"role": "user", "content": content} for content in contents]}


TEXT, IMAGE = {"type": "text", "text": "hi"}, {"type": "image_url", "image_url": {"url": "data:,"}}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"prompt": "hi"}, None),
        ({"prompt": "hi", "n": 1, "best_of": 1, "echo": False, "use_beam_search": False}, None),
        ({"prompt": "hi", "n": None, "best_of": None, "prompt_logprobs": None, "max_tokens": None}, None),
        ({"prompt": "hi", "n": 2}, "n"),
        ({"prompt": "hi", "best_of": 3}, "best_of"),
        ({"prompt": "hi", "use_beam_search": True}, "beam_search"),
        ({"prompt": "hi", "echo": True}, "echo"),
        ({"prompt": "hi", "prompt_logprobs": 0}, "prompt_logprobs"),
        ({"prompt": "hi", "logprobs": 5}, None),
        ({"prompt": ["hi"]}, None),
        ({"prompt": ["hi", "ho"]}, "several_prompts"),
        ({"prompt": [1, 2, 3]}, None),
        ({"prompt": [[1, 2, 3]]}, None),
        ({"prompt": [[1, 2], [3]]}, "several_prompts"),
        ({"prompt": []}, None),
        ({"prompt_embeds": "AAAA"}, "prompt_embeds"),
        ({"prompt": "hi", "max_tokens": 1}, "one_token"),
        ({"prompt": "hi", "max_tokens": 2}, None),
        ({"prompt": "hi", "max_completion_tokens": 1}, None),
        ({"prompt": "hi", "max_tokens": True}, None),
        ({"prompt": 3, "n": "two", "max_tokens": "one"}, None),
        ({}, None),
    ],
)
def test_completions(body, expected):
    assert whole_reason(body, is_chat=False) == expected


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (chat("hi"), None),
        (chat([TEXT]), None),
        (chat(["plain", {"text": "no type"}, {"type": "refusal", "refusal": "no"}]), None),
        (chat("hi", [TEXT, IMAGE]), "multimodal"),
        (chat([{"image_url": "http://x/y.png"}]), "multimodal"),
        (chat([{"type": "input_audio", "input_audio": {}}]), "multimodal"),
        (chat([{"type": "something_new"}]), "multimodal"),
        (chat(None), None),
        ({"messages": "hi"}, None),
        ({"messages": ["hi", None, {"role": "user"}]}, None),
        ({**chat("hi"), "n": 2}, "n"),
        ({**chat("hi"), "echo": True}, "echo"),
        ({**chat("hi"), "prompt_logprobs": 1}, "prompt_logprobs"),
        ({**chat("hi"), "max_tokens": 1}, "one_token"),
        ({**chat("hi"), "max_completion_tokens": 1, "max_tokens": 50}, "one_token"),
        ({**chat("hi"), "max_completion_tokens": 50, "max_tokens": 1}, None),
        ({**chat("hi"), "prompt": ["not", "read"]}, None),
    ],
)
def test_chat(body, expected):
    assert whole_reason(body, is_chat=True) == expected
