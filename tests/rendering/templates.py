"""Chat templates of known families, reduced to their behaviour, on a byte-level tokenizer."""

# ruff: noqa: E501 - a line break inside a template is part of it

from __future__ import annotations

from tests.rendering.family_templates import ADDED, ENDS, FAMILIES, SPECIAL
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

# SmolLM2, verbatim in behaviour: copies any role into the header, default system message.
CHATML = """{% for message in messages %}{% if loop.first and message['role'] != 'system' %}\
{{ '<|im_start|>system\nYou are Smol.<|im_end|>\n' }}{% endif %}\
{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

_QWEN_TOOLS = """\
{%- if tools %}{{- '<|im_start|>system\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{% elif default %}{{- default + '\n\n' }}{%- endif %}
{{- '# Tools\n<tools>' }}{%- for tool in tools %}{{- '\n' }}{{- tool | tojson }}{%- endfor %}
{{- '\n</tools>\nReturn calls within <tool_call></tool_call> tags.<|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- elif default %}{{- '<|im_start|>system\n' + default + '<|im_end|>\n' }}{%- endif %}"""

_QWEN_CALLS = """\
{%- for call in message.tool_calls %}{%- if not loop.first or content %}{{- '\n' }}{%- endif %}
{{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson }}{{- '}\n</tool_call>' }}{%- endfor %}"""

_QWEN_RESULT = """\
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}"""

_QWEN_OPEN = "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"

# Qwen2.5: default system message, JSON calls, tool results inside a user turn.
QWEN25 = (
    "{%- set default = 'You are Qwen.' %}"
    + _QWEN_TOOLS
    + """\
{%- for message in messages %}{%- set content = message.content %}
{%- if message.role == 'user' or message.role == 'assistant' or (message.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + message.role + '\n' + content }}"""
    + _QWEN_CALLS
    + "{{- '<|im_end|>\n' }}{%- elif message.role == 'tool' %}"
    + _QWEN_RESULT
    + "{%- endif %}{%- endfor %}"
    + _QWEN_OPEN
)

# Qwen3: no default system message; thoughts are shown after the last real question only.
QWEN3 = (
    "{%- set default = '' %}"
    + _QWEN_TOOLS
    + """\
{%- set ns = namespace(open=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}{%- set index = messages|length - 1 - loop.index0 %}
{%- if ns.open and message.role == 'user' and not (message.content.startswith('<tool_response>')
and message.content.endswith('</tool_response>')) %}{%- set ns.open = false %}{%- set ns.last = index %}
{%- endif %}{%- endfor %}
{%- for message in messages %}{%- set content = message.content %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}
{%- elif message.role == 'assistant' %}{%- set thought = '' %}
{%- if message.reasoning_content is string %}{%- set thought = message.reasoning_content %}
{%- elif '</think>' in content %}
{%- set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\n') %}{%- endif %}
{{- '<|im_start|>assistant\n' }}
{%- if loop.index0 > ns.last and (loop.last or thought) %}
{{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
{%- else %}{{- content }}{%- endif %}"""
    + _QWEN_CALLS
    + "{{- '<|im_end|>\n' }}{%- elif message.role == 'tool' %}"
    + _QWEN_RESULT
    + "{%- endif %}{%- endfor %}"
    + _QWEN_OPEN
)

# Llama-3: begins with its own bos, trims every content, copies any role into the header.
LLAMA3 = """{% for message in messages %}\
{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + \
'<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}\
{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""

# Llama-3.1: prints the date, has a role of its own for tool results (as JSON), foreign tool calls.
LLAMA31 = """{{- bos_token }}{%- if messages[0].role == 'system' %}{%- set system = messages[0].content | trim %}\
{%- set messages = messages[1:] %}{%- else %}{%- set system = '' %}{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\n\nToday Date: ' + strftime_now('%d %b %Y') + '\n\n' }}
{%- for tool in tools or [] %}{{- tool | tojson }}{%- endfor %}{{- system + '<|eot_id|>' }}
{%- for message in messages %}{%- if message.tool_calls %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{{- '{"name": "' + message.tool_calls[0].function.name + '", "parameters": ' }}
{{- message.tool_calls[0].function.arguments | tojson }}{{- '}<|eot_id|>' }}
{%- elif message.role == 'tool' %}
{{- '<|start_header_id|>ipython<|end_header_id|>\n\n' }}{{- message.content | tojson }}{{- '<|eot_id|>' }}
{%- else %}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' + message.content | trim + '<|eot_id|>' }}
{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"""

# Gemma: roles must alternate, no system role, the assistant is called model.
GEMMA = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}\
{% endif %}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('Conversation roles must alternate') }}{% endif %}\
{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}\
{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""

# DeepSeek-R1's distillations: the prompt opens the thought, old thoughts are cut away.
R1 = """{{ bos_token }}{% for message in messages %}{% if message['role'] == 'system' %}{{ message['content'] }}\
{% elif message['role'] == 'assistant' %}\
{{ '<|Assistant|>' + message['content'].split('</think>')[-1] + '<|eot_id|>' }}\
{% else %}{{ '<|User|>' + message['content'] }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ '<|Assistant|><think>\n' }}{% endif %}"""

TEMPLATES = {
    "chatml": CHATML,
    "qwen25": QWEN25,
    "qwen3": QWEN3,
    "llama3": LLAMA3,
    "llama31": LLAMA31,
    "gemma": GEMMA,
    "r1": R1,
    **FAMILIES,
}

_ENDS = {
    "llama3": "<|eot_id|>",
    "llama31": "<|eot_id|>",
    "gemma": "<end_of_turn>",
    "r1": "<|eot_id|>",
    **ENDS,
}
_SPECIAL = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>",
    "<|eot_id|>", "<start_of_turn>", "<end_of_turn>", "<|User|>", "<|Assistant|>",
    *SPECIAL,
]  # fmt: skip
_MARKUP = [
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    *ADDED,
]  # in the vocabulary, but not special, as in Qwen


def byte_tokenizer(template: str) -> PreTrainedTokenizerFast:
    """256 byte tokens, then special ones; `template` is a key of TEMPLATES or a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in _SPECIAL])
    backend.add_tokens([AddedToken(t, special=False, normalized=False) for t in _MARKUP])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|begin_of_text|>",
        eos_token=_ENDS.get(template, "<|endoftext|>"),
    )
    tokenizer.chat_template = TEMPLATES.get(template, template)
    return tokenizer
