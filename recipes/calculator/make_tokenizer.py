"""Writes the policy's tokenizer: `make_tokenizer.py [policy]`. Standard library only; the output is committed.

The vocabulary is made by hand, not trained: whole words of the recipe, numbers of two digits, the fixed parts of a tool call,
and the 256 bytes for everything else, so that any text can be written. A piece that the pattern below cuts out is one token
if it is in the vocabulary, and its bytes otherwise (`ignore_merges`, no merges). What the policy writes is always cut
in the same way again, and a conversation sent back by the agent gives the very ids that were sampled.
"""

import json
import re
import sys
from pathlib import Path

from agent import SYSTEM
from make_data import ASKS, DISTRACTORS

END = "<|im_end|>"
SPECIAL = ["<|endoftext|>", "<|im_start|>", END]
# Markers the policy writes and servers look for in its text: tokens of their own, but not hidden when decoding.
MARKERS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
PHRASES = ['\n{"name": "calculator", "arguments": {"expression": "', '"}}\n', "system\n", "user\n", "assistant\n"]
# In this order: a fixed phrase; two digits or one; a sign with the spaces around it; a word with the space before it, and the one
# after it where a number follows; any other character.
PATTERN = "|".join([*map(re.escape, PHRASES), "[0-9]{1,2}", " ?[-+*/] ?", " ?[A-Za-z]+(?: (?=[0-9(]))?", r"[\s\S]"])

TEMPLATE = """\
{%- if tools or messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + ('\\n' if tools else '') }}
    {%- endif %}
    {%- if tools %}
        {{- 'Tools:' }}
        {%- for tool in tools %}
            {{- ' ' + tool.function.name + '(' + (tool.function.parameters.properties | join(', ')) + ')' }}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- set content = message.content or '' %}
    {%- if message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- elif not (loop.first and message.role == 'system') %}
        {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- for call in message.tool_calls or [] %}
            {%- set function = call.function or call %}
            {%- if content or not loop.first %}
                {{- '\\n' }}
            {%- endif %}
            {{- '<tool_call>\\n{"name": "' + function.name + '", "arguments": ' }}
            {{- function.arguments if function.arguments is string else function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def words():
    """Every piece longer than a character that the recipe's texts are cut into, in order of first appearance."""
    questions = [ask.format(expression) for ask in ASKS for expression in ("12 + 34 - 56", "(12 * 34)")]
    asides = [aside.format("12") for aside in DISTRACTORS]
    texts = [SYSTEM, "\nTools: calculator(expression)", "error: invalid expression", "error: unknown tool"]
    texts += [f"{first} {second}" for first in questions for second in asides]
    texts += [f"{second} {first}" for first in questions for second in asides]
    pieces = [piece for text in texts for piece in re.findall(PATTERN, text)]
    numbers = [f"{number:02}" for number in range(100)]
    return [piece for piece in dict.fromkeys([*PHRASES, *numbers, *pieces]) if len(piece) > 1]


def byte_characters():
    """The printable character that stands for each byte in byte-level tokenizers (GPT-2's table)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {byte: chr(256 + at) for at, byte in enumerate(others)}


def tokenizer():
    characters = byte_characters()
    pieces = [characters[byte] for byte in range(256)]
    pieces += ["".join(characters[byte] for byte in word.encode()) for word in words()]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    added = [
        {
            "id": len(vocabulary) + index,
            "content": content,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": content in SPECIAL,
        }
        for index, content in enumerate(SPECIAL + MARKERS)
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": PATTERN}, "behavior": "Isolated", "invert": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": True,
            "vocab": vocabulary,
            "merges": [],
        },
    }


def model_config(vocabulary_size, end):
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": vocabulary_size,
        "hidden_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 384,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": True,
        "initializer_range": 0.02,
        "bos_token_id": None,
        "eos_token_id": end,
        "use_cache": True,
        "use_sliding_window": False,
        "torch_dtype": "float32",
    }


def main():
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent / "policy")
    folder.mkdir(parents=True, exist_ok=True)
    made = tokenizer()
    ids = {token["content"]: token["id"] for token in made["added_tokens"]}
    size = len(made["model"]["vocab"]) + len(ids)
    configuration = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": END,
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "additional_special_tokens": ["<|im_start|>", END],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 512,
        "chat_template": TEMPLATE,
    }
    generation = {"eos_token_id": ids[END], "pad_token_id": ids["<|endoftext|>"], "do_sample": True, "temperature": 1.0}
    for name, content in {
        "tokenizer.json": made,
        "tokenizer_config.json": configuration,
        "config.json": model_config(size, ids[END]),
        "generation_config.json": generation,
    }.items():
        (folder / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
    print(f"{folder}: a vocabulary of {size} tokens")


if __name__ == "__main__":
    main()
