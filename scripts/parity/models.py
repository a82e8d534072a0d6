"""Small random models and conversations, shared by the fixture maker and the live comparison."""

import json
from pathlib import Path

import jinja2
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, trainers
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

HERE = Path(__file__).parent
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKERS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
TEMPLATES = ["qwen3", "strict", "chatml", "headers", "turns", "modes"]

SIZES = dict(
    vocab_size=128,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    # No pad token: transformers neither draws nor trains the embedding of one.
    # Large enough that attention and logits are far from uniform: near-zero logits would agree by accident.
    initializer_range=0.25,
    rms_norm_eps=1e-6,
    bos_token_id=0,
    eos_token_id=2,
)

# For what came later: files as small as they can be.
SMALL = {**SIZES, "hidden_size": 24, "intermediate_size": 32}
# Shorter than every sequence that is compared.
WINDOW = 8

CONFIGS = {
    "qwen3-tied": lambda: Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True, rope_theta=10000.0),
    "qwen3-untied": lambda: Qwen3Config(**SIZES, head_dim=8, tie_word_embeddings=False, rope_theta=1000000.0),
    "qwen2": lambda: Qwen2Config(**SIZES, tie_word_embeddings=True, rope_theta=10000.0),
    "llama": lambda: LlamaConfig(
        **SIZES,
        tie_word_embeddings=False,
        rope_theta=500000.0,
        rope_scaling=dict(
            rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
        ),
    ),
    "llama-biases": lambda: LlamaConfig(**SMALL, head_dim=8, attention_bias=True, mlp_bias=True, tie_word_embeddings=False),
    "smollm2": lambda: LlamaConfig(
        **{**SMALL, "hidden_size": 36, "num_attention_heads": 9, "num_key_value_heads": 3, "rms_norm_eps": 1e-5},
        tie_word_embeddings=True,
        rope_theta=100000.0,
    ),
    "smollm3": lambda: SmolLM3Config(
        **{**SMALL, "num_hidden_layers": 3}, head_dim=8, no_rope_layer_interval=3, pad_token_id=None, rope_theta=5000000.0
    ),
    "gemma3": lambda: Gemma3TextConfig(
        **{**SMALL, "num_hidden_layers": 3},
        head_dim=8,
        query_pre_attn_scalar=20,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        sliding_window=WINDOW,
        rope_theta=1000000.0,
        rope_local_base_freq=1000.0,
        rope_scaling=dict(rope_type="linear", factor=8.0),
        pad_token_id=None,
    ),
    "qwen3-window": lambda: Qwen3Config(
        **SMALL, head_dim=8, tie_word_embeddings=True, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1
    ),
    "qwen2-yarn": lambda: Qwen2Config(
        **{**SMALL, "max_position_embeddings": 256},
        tie_word_embeddings=False,
        rope_theta=1000000.0,
        rope_scaling=dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=64),
    ),
}


def make_tokenizer():
    """Characters of printable ASCII, a few merges, and the markers of chat and tool calls."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.decoder = decoders.Fuse()
    alphabet = [chr(c) for c in range(32, 127)] + ["\n"]
    corpus = ['the sum of the answer is "name": "calculator", "arguments": {"expression": "1 + 2"}'] * 3
    trainer = trainers.BpeTrainer(
        vocab_size=len(SPECIAL) + len(alphabet) + 14, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False
    )
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.add_tokens([AddedToken(marker, normalized=False) for marker in MARKERS])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=SPECIAL[0], eos_token=SPECIAL[2], pad_token=SPECIAL[0]
    )
    fast.chat_template = template("qwen3")
    return fast


def template(name):
    return (HERE / "templates" / f"{name}.jinja").read_text()


def make_model(name, seed):
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[name]()).float().eval()
    gemma = model.config.model_type.startswith("gemma")
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "norm" in key:
                # Gemma stores the weights of norms less 1. What its blocks add is made larger than the embeddings: these are
                # scaled up, and would have the model repeat its last token.
                mean = (2.0 if "post_" in key else 0.0) if gemma else 1.0
                parameter.copy_(mean + 0.2 * torch.randn_like(parameter))
            elif key.endswith("bias"):
                parameter.copy_(0.2 * torch.randn_like(parameter))
    return model


def logits(model, ids):
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].float()


def token_ids(seed, length, vocab=128):
    return torch.randint(0, vocab, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Evaluates <an> expression & answers \"it\" – exactly.",
        "parameters": {
            "type": "object",
            "properties": {
                "expression": {"type": "string", "description": "such as 1 + 2"},
                "precision": {"type": "number", "default": 1e-05, "maximum": 2.0, "nullable": True},
            },
            "required": ["expression"],
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}

EDIT = {
    "type": "function",
    "function": {
        "name": "edit",
        "description": "It's an \"edit\"\nof a file.",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {
                "path": {"type": "string"},
                "changes": {"type": "array", "items": {"type": "object", "additionalProperties": False}, "minItems": 1},
                "mode": {"enum": ["all", "first", None], "default": None},
            },
            "required": ["path", "changes"],
        },
    },
}
NESTED = {"path": "a/b.py", "changes": [{"from": 1, "to": [2, 3.5, None], "text": "it's\n\"x\""}, {}], "force": False, "big": 1e20}


def call(name, arguments):
    return {"id": "call_1", "type": "function", "function": {"name": name, "arguments": arguments}}


CONVERSATIONS = [
    dict(messages=[{"role": "user", "content": "What is 1 + 2?"}]),
    dict(messages=[{"role": "system", "content": "Be brief.\n"}, {"role": "user", "content": " Hi {{ x }} \n"}]),
    dict(
        messages=[
            {"role": "system", "content": "Use tools."},
            {"role": "user", "content": "What is 17 * 3?"},
            {"role": "assistant", "content": None, "tool_calls": [call("calculator", {"expression": "17 * 3"})]},
            {"role": "tool", "tool_call_id": "call_1", "content": "51"},
        ],
        tools=[CALCULATOR],
    ),
    dict(
        messages=[
            {"role": "user", "content": "Twice."},
            {
                "role": "assistant",
                "content": "Let me see.",
                "tool_calls": [call("calculator", {"expression": "é\"\\\n", "precision": 2.0}), call("clock", {})],
            },
            {"role": "tool", "content": "1"},
            {"role": "tool", "content": "noon"},
            {"role": "assistant", "content": "It is 1 at noon."},
            {"role": "user", "content": "Thanks"},
        ],
        tools=[CALCULATOR, CLOCK],
    ),
    dict(
        messages=[
            {"role": "user", "content": "Think."},
            {"role": "assistant", "content": "<think>\nhard\n</think>\n\nDone."},
            {"role": "user", "content": "Again."},
            {"role": "assistant", "content": "<think>\nharder\n</think>\n\nDone again."},
        ],
        add_generation_prompt=False,
    ),
    dict(messages=[{"role": "user", "content": "No thinking."}], variables={"enable_thinking": False}),
    # Thinking beside the answer, before and after the last question.
    dict(
        messages=[
            {"role": "user", "content": "First."},
            {"role": "assistant", "content": "One.", "reasoning_content": "\nforgotten\n"},
            {"role": "user", "content": "Use it."},
            {
                "role": "assistant",
                "content": "",
                "reasoning_content": "kept: it came after the question",
                "tool_calls": [call("clock", {})],
            },
            {"role": "tool", "tool_call_id": "call_1", "content": '{"hour": 12}'},
        ],
        tools=[CLOCK],
    ),
    # One call at a time, twice, with nested arguments of every kind.
    dict(
        messages=[
            {"role": "system", "content": "You act.\n\n/no_think"},
            {"role": "user", "content": "Do both."},
            {"role": "assistant", "content": "", "tool_calls": [call("edit", NESTED)]},
            {"role": "tool", "name": "edit", "tool_call_id": "call_1", "content": "done\n"},
            {"role": "assistant", "content": "Next.", "tool_calls": [call("clock", {})]},
            {"role": "tool", "name": "clock", "tool_call_id": "call_1", "content": "<tool_response>odd</tool_response>"},
        ],
        tools=[EDIT, CLOCK],
        variables={"tools_in_user_message": False},
    ),
    dict(
        messages=[
            {"role": "system", "content": "Only this. /override /think"},
            {"role": "user", "content": "a < b && c > 'd' \\ \"e\" \t\u00a0ü"},
            {"role": "assistant", "content": "Fine."},
            {"role": "user", "content": "<tool_response>not one</tool_response>"},
        ],
    ),
    dict(
        messages=[
            {"role": "system", "content": [{"type": "text", "text": "In parts."}]},
            {"role": "user", "content": [{"type": "text", "text": " What is "}, {"type": "image"}, {"type": "text", "text": "this?"}]},
        ],
    ),
    dict(messages=[{"role": "user", "content": "Hi"}, {"role": "user", "content": "again"}], variables={"date_string": "2 Feb 2026"}),
    dict(messages=[{"role": "critic", "content": "Who am I?"}]),
    dict(
        messages=[
            {"role": "user", "content": "Run it."},
            {"role": "assistant", "content": "", "tool_calls": [call("search", {"query": "rust", "limit": 3})]},
            {"role": "ipython", "content": {"results": ["a", None, True, 1.5]}},
        ],
        variables={"builtin_tools": ["code", "search"], "python_tools": ["def f(x):", "  it's \"quoted\""]},
    ),
    dict(messages=[{"role": "user", "content": ""}], tools=[EDIT], add_generation_prompt=False),
    # Several calls after one question, each with its own thinking, and a failure on the way.
    dict(
        messages=[
            {"role": "system", "content": "Be careful."},
            {"role": "user", "content": "Fix it."},
            {"role": "assistant", "content": "<think>\nread first\n</think>\n\n", "tool_calls": [call("clock", {})]},
            {"role": "tool", "tool_call_id": "call_1", "content": "Traceback (most recent call last):\n  KeyError: 'x'\n"},
            {"role": "assistant", "content": "<think>\nso again\n</think>\n\nOnce more.", "tool_calls": [call("edit", NESTED)]},
            {"role": "tool", "tool_call_id": "call_1", "content": "ok"},
            {"role": "assistant", "content": "<think>\n\n</think>\n\nFixed."},
        ],
        tools=[EDIT, CLOCK],
        add_generation_prompt=False,
    ),
    # The same without thinking from now on, and another question.
    dict(
        messages=[
            {"role": "user", "content": "Fix it."},
            {"role": "assistant", "content": "", "reasoning_content": "look", "tool_calls": [call("clock", {"zone": "Ü\u200b"})]},
            {"role": "tool", "tool_call_id": "call_1", "content": "noon"},
            {"role": "assistant", "content": "At noon.\n", "reasoning_content": "short"},
            {"role": "user", "content": "  And now?  "},
        ],
        tools=[CLOCK],
        variables={"enable_thinking": False},
    ),
    # Thinking that is asked for in so many words, tags within the text, and an end without a line break.
    dict(
        messages=[
            {"role": "user", "content": "What does </think> mean?"},
            {"role": "assistant", "content": "a</think>b</think>c"},
            {"role": "user", "content": "And <think>?"},
            {"role": "assistant", "content": "<think>d", "reasoning_content": ""},
            {"role": "user", "content": "Go on."},
        ],
        variables={"enable_thinking": True},
    ),
    dict(messages=[{"role": "user", "content": "Nothing to use."}], tools=[]),
    dict(
        messages=[
            {"role": "system", "content": "One."},
            {"role": "system", "content": "Two.", "name": "second"},
            {"role": "user", "content": "\n\n{% raw %}{{ 7 * 7 }}{% endraw %}\n", "name": "ada"},
        ],
    ),
    dict(messages=[{"role": "user", "content": "日本語 🦀 e\u0301"}, {"role": "assistant", "content": "はい"}, {"role": "user", "content": "?"}]),
    dict(
        messages=[
            {"role": "user", "content": "Search and run."},
            {"role": "assistant", "content": None, "tool_calls": [call("search", {"query": "it's \"so\"", "exact": True, "tags": []})]},
            {"role": "tool", "name": "search", "content": [{"type": "text", "text": "found"}, {"type": "text", "text": "nothing"}]},
        ],
        tools=[CALCULATOR, EDIT],
        variables={"tools_in_user_message": True, "builtin_tools": ["search"], "xml_tools": [CLOCK]},
    ),
    dict(messages=[{"role": "system", "content": "Alone."}]),
]


# What it renders to depends on the day, so it is compared live only.
DATED = dict(messages=[{"role": "user", "content": "What day is it?"}], variables={"dated": True})


def render_cases(tokenizer, conversations=CONVERSATIONS):
    """Every conversation under every template, as transformers renders or refuses it."""
    cases = []
    for name in TEMPLATES:
        for conversation in conversations:
            try:
                text = tokenizer.apply_chat_template(
                    conversation["messages"],
                    tools=conversation.get("tools"),
                    add_generation_prompt=conversation.get("add_generation_prompt", True),
                    chat_template=template(name),
                    tokenize=False,
                    **conversation.get("variables", {}),
                )
            except jinja2.TemplateError as error:
                # The template's own refusal, or what its language cannot do; only the first has words of its own.
                words = str(error) if type(error) is jinja2.TemplateError else ""
                cases.append(dict(template=name, **conversation, refused=words))
                continue
            except TypeError:
                cases.append(dict(template=name, **conversation, refused=""))
                continue
            ids = tokenizer(text, add_special_tokens=False)["input_ids"] if text.isascii() else None
            cases.append(dict(template=name, **conversation, expected=text, expected_ids=ids))
    return cases


def write_json(path, value):
    path.write_text(json.dumps(value, ensure_ascii=False, separators=(",", ":")) + "\n")
