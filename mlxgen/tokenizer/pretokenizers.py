"""How byte-level vocabularies cut text before BPE: the regular expressions behind `tokenizer.ggml.pre`.

Each entry is a list of expressions; every one cuts what the ones before it left, keeping matches and gaps.
They are those of the models' own tokenizer.json files.
"""

from __future__ import annotations

from typing import Any

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_MARKS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_BLANK = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{{1,3}}|{_MARKS}|{_BLANK}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}|{_MARKS}|{_BLANK}"
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_BLANK}"
)

# Words cut where upper case follows lower case: upper-case letters, then lower-case ones.
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_MARKS_OR_SLASHES = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"


def _cased(upper: str, lower: str, after: str, digits: str, marks: str) -> str:
    word = r"[^\r\n\p{L}\p{N}]?"
    return f"{word}{upper}*{lower}+{after}|{word}{upper}+{lower}*{after}|{digits}|{marks}|{_BLANK}"


_TEKKEN = _cased(_UPPER, _LOWER, "", r"\p{N}", _MARKS_OR_SLASHES)
_GPT4O = _cased(_UPPER, _LOWER, _CONTRACTIONS + "?", r"\p{N}{1,3}", _MARKS_OR_SLASHES)
_NOT_HAN = r"&&[^\p{Han}]]"
_KIMI = r"\p{Han}+|" + _cased(
    _UPPER[:-1] + _NOT_HAN, _LOWER[:-1] + _NOT_HAN, _CONTRACTIONS + "?", r"\p{N}{1,3}", _MARKS
)

_PUNCTUATION = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""
_DEEPSEEK3 = (
    rf"{_PUNCTUATION}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_BLANK}"
)
_CJK, _CJK_KANA = "[一-龥ࠀ-一가-퟿]+", "[一-龥\u3040-ゟ゠-ヿ]+"
# Letters that have case, in the Unicode version and the blocks that DeepSeek chose.
_CASED = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ"
    "\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿ"
    "ﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_SENTENCE_ENDS = r" ?[^(\s|.,!?…。，、।۔،)]+"
_BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
_DIGITS_FROM_THE_END = r"\d{1,3}(?=(?:\d{3})*\b)"

DEFAULT = [r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"]

_TABLE: dict[str, list[str]] = {
    "default": DEFAULT,
    "gpt-2 phi-2 gigachat a.x-4.0 mellum modern-bert mpt olmo jais trillion granite-docling exaone4 "
    "jina-es jina-de jina-v1-en jina-v2-es jina-v2-de jina-v2-code roberta-bpe": [_GPT2],
    "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2": [r"\p{N}", _GPT2],
    "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano dbrx smaug-bpe glm4 "
    "chatglm-bpe": [_LLAMA3],
    "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2": [_QWEN2],
    "qwen35": [_QWEN35],
    "tekken": [_TEKKEN],
    "gpt-4o llama4 kanana2 talkie minimax-m2": [_GPT4O],
    "tiny_aya cohere2moe": [_DIGITS_FROM_THE_END, _GPT4O],
    "kimi-k2": [_KIMI],
    "deepseek-llm": [
        r"[\r\n]",
        rf"\s?[{_CASED}]+",
        "\\s?[!-/:-~！-／：-～‘-‟\u3000-。]+",
        r"\s+\z",
        _CJK,
        r"\p{N}+",
    ],
    "deepseek-coder": [r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}"],
    "deepseek-v3 hunyuan-dense joyai-llm hy_v4": [r"\p{N}{1,3}", _CJK_KANA, _DEEPSEEK3],
    "falcon": [r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]"],
    "poro-chat bloom gpt3-finnish": [_SENTENCE_ENDS],
    "viking": [_SENTENCE_ENDS, r"\p{N}"],
    "bailingmoe bailingmoe2 llada-moe": [_BAILING],
    "seed-coder": [
        rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_BLANK}",
    ],
    "superbpe": [r"\p{N}+", r"(?=(\d{3})+(?!\d))"],
    "minicpm5": [r"\p{N}{1,3}", rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}+|{_MARKS}|{_BLANK}"],
}

EXPRESSIONS = {name: rules for names, rules in _TABLE.items() for name in names.split()}

# These look a whole word up in the vocabulary before they merge.
IGNORE_MERGES = {"llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"}
IGNORE_MERGES |= {"jina-v5-nano", "tekken", "minicpm5"}
# These begin a prompt with BOS where the file does not say.
ADD_BOS = (IGNORE_MERGES - {"minicpm5"}) | {"chameleon"}


def byte_level(pre: str) -> Any:
    """The pre-tokenizer that belongs to `pre`; the default one for a name that is not in the table."""
    from tokenizers import Regex, pre_tokenizers

    rules = EXPRESSIONS.get(pre, DEFAULT)
    steps: list[Any] = [pre_tokenizers.Split(Regex(rule), "isolated") for rule in rules]
    # Last, so that the expressions see characters; it then writes bytes.
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    return pre_tokenizers.Sequence(steps)
