"""Saves small tokenizers with chat templates in the style of a model family, and small models.

The tokenizer is a byte-level BPE with few merges. So decoding and encoding sampled tokens usually gives different
tokens.
"""

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE

CORPUS = ("the weather tool says that the city is warm", "how warm is it in the city", "system user assistant tool")

QWEN3 = """\
{%- if tools %}
{{- '<|im_start|>system\\n' + (messages[0].content + '\\n\\n' if messages[0].role == 'system' else '') }}
{{- '# Tools\\n\\nYou may call one or more functions to assist with the user query.\\n\\nYou are provided with \
function signatures within <tools></tools> XML tags:\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
{{- '\\n</tools>\\n\\nFor each function call, return a json object with function name and arguments within \
<tool_call></tool_call> XML tags:\\n<tool_call>\\n{\\"name\\": <function-name>, \\"arguments\\": \
<args-json-object>}\\n</tool_call><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- elif m.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > ns.last and (loop.last or m.reasoning_content) %}
{{- '<think>\\n' + (m.reasoning_content or '').strip('\\n') + '\\n</think>\\n\\n' + m.content.lstrip('\\n') }}
{%- else %}{{- m.content }}{%- endif %}
{%- for call in m.tool_calls or [] %}
{{- '\\n' if not loop.first or m.content }}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif m.role == 'tool' %}
{{- '<|im_start|>user' if loop.first or messages[loop.index0 - 1].role != 'tool' }}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{{- '<|im_end|>\\n' if loop.last or messages[loop.index0 + 1].role != 'tool' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
{{- '<think>\\n\\n</think>\\n\\n' if enable_thinking is defined and enable_thinking is false }}{%- endif %}"""

CHATML = """\
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\\n' + m.content }}
{%- for call in m.tool_calls or [] %}{{- '<tool_call>' + call.function | tojson + '</tool_call>' }}{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{{- '<|im_start|>assistant\\n' if add_generation_prompt }}"""
"""The template never changes earlier text, and has no reasoning. The library ``renderers`` does not support it."""

LLAMA = """\
{{- bos_token }}
{%- for m in messages %}
{%- if (m.tool_calls or []) | length > 1 %}{{- raise_exception('one tool call per message') }}{%- endif %}
{{- '<|start_header_id|>' + ('ipython' if m.role == 'tool' else m.role) + '<|end_header_id|>\\n\\n' + m.content }}
{%- for call in m.tool_calls or [] %}
{{- '{"name": "' + call.function.name + '", "parameters": ' + call.function.arguments | tojson + '}' }}
{%- endfor %}
{{- '<|eot_id|>' }}
{%- endfor %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' if add_generation_prompt }}"""

GLM = """\
{{- '[gMASK]<sop>' }}
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'tool' %}
{{- '<|observation|>' if messages[loop.index0 - 1].role != 'tool' }}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- elif m.role == 'assistant' %}
{{- '<|assistant|>\\n<think>' + (m.reasoning_content or '' if loop.index0 > ns.last else '') + '</think>' }}
{{- '\\n' + m.content if m.content }}
{%- for call in m.tool_calls or [] %}
{{- '\\n<tool_call>' + call.function | tojson + '</tool_call>' }}
{%- endfor %}
{%- else %}{{- '<|' + m.role + '|>\\n' + m.content }}{%- endif %}
{%- endfor %}
{{- '<|assistant|>' if add_generation_prompt }}"""
"""An assistant's message has no end marker. The model samples the marker of the next message."""

DEEPSEEK = """\
{{- bos_token }}
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{{- m.content }}
{%- for call in m.tool_calls or [] %}{{- '<tool_call>' + call.function | tojson + '</tool_call>' }}{%- endfor %}
{{- eos_token }}
{%- elif m.role == 'user' %}{{- '<|User|>' + m.content + ('<|Assistant|>' if not loop.last or add_generation_prompt) }}
{%- elif m.role == 'tool' %}{{- '<|tool_output|>' + m.content }}
{{- '<|Assistant|>' if loop.last and add_generation_prompt }}
{{- '<|Assistant|>' if not loop.last and messages[loop.index].role != 'tool' }}
{%- else %}{{- m.content }}{%- endif %}
{%- endfor %}
{{- '<think>\\n' if add_generation_prompt }}"""
"""The template never renders reasoning of earlier messages. It begins the reasoning in the prompt of each turn."""

TEMPLATES = {"qwen3": QWEN3, "chatml": CHATML, "llama": LLAMA, "glm": GLM, "deepseek": DEEPSEEK, "plain": ""}

_MARKERS = {
    "qwen3": ("<|im_start|>", "<|im_end|>"),
    "chatml": ("<|im_start|>", "<|im_end|>"),
    "llama": ("<|begin|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "glm": ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
    "deepseek": ("<|begin|>", "<|User|>", "<|Assistant|>", "<|tool_output|>"),
    "plain": ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|tools|>"),
}
_TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")


@cache
def _trained() -> str:
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer.to_str()


def save_chat_model(
    folder: Path, style: str = "qwen3", *, template: str | None = None, calls: Sequence[str] = ()
) -> str:
    """Save a tokenizer with the chat template of the style ``style``. Returns the folder.

    Each tool call in ``calls`` becomes one token of the tokenizer. It is JSON: ``{"name": "read", "arguments": {}}``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer.from_str(_trained())
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ("<|endoftext|>", *_MARKERS[style])])
    called = [f"<tool_call>{call}</tool_call>" for call in calls]
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in (*_TAGS, *called)])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "eos_token": {"qwen3": "<|im_end|>", "chatml": "<|im_end|>", "llama": "<|eot_id|>"}.get(style, "<|endoftext|>"),
        "bos_token": "<|begin|>" if "<|begin|>" in _MARKERS[style] else None,
        "chat_template": TEMPLATES[style] if template is None else template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"model_type": style, "vocab_size": tokenizer.get_vocab_size()}))
    return str(folder)


def save_calling_policy(folder: Path, calls: Sequence[str], *, p_call: float = 0.1, p_stop: float = 0.15) -> str:
    """Save a random Qwen3 of 40k parameters that calls tools by chance. Returns the folder.

    Decoding and encoding its sampled tokens usually gives different tokens.

    Args:
        folder: Folder for the model, its tokenizer and its ``chatml`` template.
        calls: As in `save_chat_model`.
        p_call: Approximate probability that a sampled token is a given tool call.
        p_stop: Approximate probability that a sampled token ends the turn.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    save_chat_model(folder, "chatml", calls=calls)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    texts = [f"<tool_call>{call}</tool_call>" for call in calls]
    stop, size = tokenizer.token_to_id("<|im_end|>"), tokenizer.get_vocab_size()
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=size,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        intermediate_size=64,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        eos_token_id=stop,
    )
    model = Qwen3ForCausalLM(config)
    # All hidden states get a common direction. Along this direction, the output layer sets the token probabilities.
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(10).add_(1)
        hidden = model.model(torch.arange(size)[None]).last_hidden_state[0].mean(0)
        bias = hidden / hidden.square().sum()
        logits = torch.zeros(size)
        logits[stop] = p_stop
        logits[[tokenizer.token_to_id(text) for text in texts]] = p_call
        logits[logits == 0] = (1 - logits.sum()) / (logits == 0).sum()
        model.lm_head.weight.mul_(5).add_(logits.log()[:, None] * bias)
    model.save_pretrained(folder)
    return str(folder)
