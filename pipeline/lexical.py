"""What a prompt's surface tells of the reply's length: numbers for the gradient boosting baseline.

Source: Clairvoyant (arXiv 2606.07248) predicts lengths from 19 lexical features with gradient boosted trees; these are
ours of the same kind. Standard library and numpy only.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_ENDS_CHARS = 4000  # of a longer prompt, this much of either end is looked at; its sizes are exact

_SIZES = (
    "log_chars", "log_words", "log_lines", "mean_word_chars", "question_marks", "ends_with_question", "code_fences",
    "digit_share", "upper_share", "punctuation_share", "bullets", "largest_number", "asked_words",
)  # fmt: skip

# Words that ask for something long, something short, or a certain kind of text.
_KEY_WORDS = {
    "write": r"write|compose|draft|generate|create|make",
    "long_form": r"essay|article|story|blog|chapter|report|script|speech|outline|plan|proposal",
    "list": r"lists?|ideas|examples?|ways|steps|tips|names|titles",
    "table": r"table|columns?|csv|json|spreadsheet",
    "explain": r"explain|describe|discuss|elaborate|why|how",
    "detail": r"detail(?:ed|s)?|comprehensive|in[- ]depth|thorough|complete|full",
    "brief": r"brief(?:ly)?|short(?:er)?|concise|one (?:word|sentence|line)|only|just",
    "summarise": r"summari[sz]e|summary|tl;?dr|key points|rewrite|rephrase|paraphrase|shorten",
    "translate": r"translate|translation|in (?:english|spanish|french|german|chinese)",
    "go_on": r"continue|go on|next|more|again|another|keep going|rest",
    "code": r"code|function|class|python|javascript|java|html|css|sql|api|implement|program",
    "fix": r"fix|error|bug|exception|wrong|issue|debug|not work(?:ing)?",
    "which": r"what|which|who|when|where|is|are|does|do|can|could|will|would|should",
    "thanks": r"thanks?|thank you|ok(?:ay)?|great|good|yes|no|hi|hello|sure",
    "answer_choice": r"true or false|yes or no|choose|select|pick|answer",
}
_PATTERNS = {name: re.compile(rf"\b(?:{words})\b", re.IGNORECASE) for name, words in _KEY_WORDS.items()}
_BULLET = re.compile(r"^\s*(?:[-*•]|\d+[.)])\s", re.MULTILINE)
_NUMBER = re.compile(r"\b\d{1,6}\b")
_ASKED_WORDS = re.compile(r"\b(\d{1,5})[ -]?(?:words?|characters?|sentences?|paragraphs?|pages?)\b", re.IGNORECASE)

LEXICAL_NAMES = (*_SIZES, *(f"has_{name}" for name in _KEY_WORDS), "starts_with_write", "starts_with_which")
NUM_LEXICAL = len(LEXICAL_NAMES)


def lexical_features(text: str) -> tuple[float, ...]:
    """`LEXICAL_NAMES` of a prompt."""
    ends = text if len(text) <= 2 * _ENDS_CHARS else f"{text[:_ENDS_CHARS]}\n{text[-_ENDS_CHARS:]}"
    words, num_chars = text.split(), max(1, len(ends))
    asked = _ASKED_WORDS.findall(ends)
    numbers = [int(number) for number in _NUMBER.findall(ends[-_ENDS_CHARS:])]
    start = " ".join(text[:80].split()[:3])
    return (
        math.log1p(len(text)),
        math.log1p(len(words)),
        math.log1p(text.count("\n")),
        sum(map(len, words)) / max(1, len(words)),
        float(min(20, ends.count("?"))),
        float(text.rstrip().endswith("?")),
        float(min(20, ends.count("```"))),
        sum(map(str.isdigit, ends)) / num_chars,
        sum(map(str.isupper, ends)) / num_chars,
        sum(not char.isalnum() and not char.isspace() for char in ends) / num_chars,
        float(min(50, len(_BULLET.findall(ends)))),
        math.log1p(max(numbers, default=0)),
        math.log1p(max(map(int, asked), default=0)),
        *(float(pattern.search(ends) is not None) for pattern in _PATTERNS.values()),
        float(_PATTERNS["write"].match(start) is not None),
        float(_PATTERNS["which"].match(start) is not None),
    )


def lexical_table(texts: Sequence[str]) -> npt.NDArray[np.float32]:
    """(texts, NUM_LEXICAL) float32."""
    return np.asarray([lexical_features(text) for text in texts], dtype=np.float32).reshape(-1, NUM_LEXICAL)
