"""A tiny Llama with random weights as a GGUF file, for llama.cpp's server: byte-level BPE, ChatML with tools, reproducible.

It writes letters mostly. How gladly is decided by one coordinate of the hidden state that is the same everywhere: a token's weight
there is its bias. Letters have no merges, so that any text of them has one tokenisation; the two bytes of "é" have, so that it may be
sampled in tokens that its tokenisation does not give. After some tokens one other follows nearly surely: each such link is a
coordinate that only these two have, and that no layer changes. So a tool call, once begun, is written to its end, and so are
characters of several tokens.
"""

import sys

import gguf
import numpy

TEMPLATE = """{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}

{% endif %}# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call><|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}{% for message in messages %}{% if message.role == 'user' or (message.role == 'system' and not loop.first) %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% elif message.role == 'assistant' %}<|im_start|>assistant
{{ message.content or '' }}{% for call in message.tool_calls or [] %}{% if not loop.first or message.content %}
{% endif %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% elif message.role == 'tool' %}<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# Words of the vocabulary, but no control tokens: they are part of the text.
CALL = ["<tool_call>", '\n{"name": "look", "arguments": ', '{"where": "here"}', "}\n", "</tool_call>"]
CHAINS = [[*CALL, "<|im_end|>"], [b"\xe2", b"\x82", b"\xac"], [b"\xc3", b"\xa9"]]
WIDTH, LAYERS, HEADS, INNER, CONTEXT = 64, 2, 4, 128, 4096


def byte_names() -> list[str]:
    """GPT-2's names of the 256 bytes."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    names, spare = {}, 256
    for byte in range(256):
        names[byte] = chr(byte) if byte in plain else chr(spare)
        spare += byte not in plain
    return [names[byte] for byte in range(256)]


def bias(text: bytes) -> float:
    """How gladly the model writes it, in logits."""
    if text == b"<|im_end|>":
        return -1.0
    is_letter = len(text) == 1 and text.isalpha() and text.isascii()
    return 0.0 if is_letter or text == b" " else -6.0 if len(text) == 1 and 32 < text[0] < 127 else -30.0


def main(path: str) -> None:
    names = byte_names()
    merges = [(names[0xC3], names[0xA9])]
    texts = [bytes([byte]) for byte in range(256)]
    texts += [bytes(names.index(part) for part in pair) for pair in merges]
    words = SPECIAL + CALL
    tokens = names + [a + b for a, b in merges] + words
    texts += [word.encode() for word in words]
    kinds = [gguf.TokenType.NORMAL] * (len(tokens) - len(words))
    kinds += [gguf.TokenType.CONTROL] * len(SPECIAL) + [gguf.TokenType.USER_DEFINED] * len(CALL)
    place = lambda word: texts.index(word.encode() if isinstance(word, str) else word)
    links = [(place(one), place(other)) for chain in CHAINS for one, other in zip(chain, chain[1:])]
    fixed = 1 + len(links)

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("agl-tiny")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(len(tokens))
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_eos_token_id(tokens.index("<|im_end|>"))
    writer.add_pad_token_id(tokens.index("<|endoftext|>"))
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)

    draw = numpy.random.default_rng(7)
    random = lambda *shape, scale: (draw.standard_normal(shape) * scale).astype(numpy.float32)
    ones = numpy.ones(WIDTH, dtype=numpy.float32)
    embedding = random(len(tokens), WIDTH, scale=1.0)
    embedding[:, :fixed] = 0.0
    embedding[:, 0] = 30.0
    for coordinate, (one, _) in enumerate(links, start=1):
        embedding[one, coordinate] = 30.0
    writer.add_tensor("token_embd.weight", embedding)
    for layer in range(LAYERS):
        for part in ["attn_q", "attn_k", "attn_v", "attn_output"]:
            weight = random(WIDTH, WIDTH, scale=0.3)
            weight[:fixed] = 0.0
            writer.add_tensor(f"blk.{layer}.{part}.weight", weight)
        for part, rows, columns in [("ffn_gate", INNER, WIDTH), ("ffn_up", INNER, WIDTH), ("ffn_down", WIDTH, INNER)]:
            weight = random(rows, columns, scale=0.1)
            if part == "ffn_down":
                weight[:fixed] = 0.0
            writer.add_tensor(f"blk.{layer}.{part}.weight", weight)
        for part in ["attn_norm", "ffn_norm"]:
            writer.add_tensor(f"blk.{layer}.{part}.weight", ones)
    writer.add_tensor("output_norm.weight", ones)
    output = random(len(tokens), WIDTH, scale=0.15)
    output[:, :fixed] = 0.0
    output[:, 0] = [bias(text) / 5.0 for text in texts]
    for coordinate, (_, other) in enumerate(links, start=1):
        output[other, coordinate] = 20.0
    writer.add_tensor("output.weight", output)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


main(sys.argv[1])
