"""Minimal chat templates of the forms that families of models use for thoughts, calls and results."""

# ruff: noqa: E501 - a line break inside a template is part of it

from __future__ import annotations

_TOOLS = "{%- for tool in tools or [] %}{{- tool | tojson + '\n' }}{%- endfor %}"
_ARGUMENTS = (
    "(call.function.arguments if call.function.arguments is string else call.function.arguments | tojson)"
)

# Qwen3-Thinking: the prompt opens a thought every time; earlier ones are cut away.
_THINKS = "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n<think>\n' }}{%- endif %}"
_XML_CALLS = """\
{%- for call in message.tool_calls or [] %}{{- '\n<tool_call>\n<function=' + call.function.name + '>\n' }}
{%- for key, value in call.function.arguments.items() %}{{- '<parameter=' + key + '>\n' }}
{{- value if value is string else value | tojson }}{{- '\n</parameter>\n' }}{%- endfor %}
{{- '</function>\n</tool_call>' }}{%- endfor %}"""
_CHATML_RESULT = (
    "{{- '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' }}"
)

# Qwen3.5: opens a thought, calls are XML.
QWEN_XML = (
    "{%- if tools %}{{- '<|im_start|>system\n' }}"
    + _TOOLS
    + """{{- '<|im_end|>\n' }}{%- endif %}
{%- for message in messages %}{%- if message.role == 'tool' %}"""
    + _CHATML_RESULT
    + """{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\n' }}
{%- if loop.last %}{{- '<think>\n' + (message.reasoning_content or '') + '\n</think>\n\n' }}{%- endif %}
{{- message.content.split('</think>')[-1].lstrip('\n') }}"""
    + _XML_CALLS
    + """{{- '<|im_end|>\n' }}{%- else %}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{%- endif %}{%- endfor %}"""
    + _THINKS
)

# DeepSeek-R1: opens a thought, but not after a result, where no header is written either.
DEEPSEEK = (
    """{{- bos_token }}{%- set ns = namespace(tool=false) %}"""
    + _TOOLS
    + """\
{%- for message in messages %}{%- if message.role == 'system' %}{{- message.content }}
{%- elif message.role == 'user' %}{%- set ns.tool = false %}{{- '<｜User｜>' + message.content }}
{%- elif message.role == 'tool' %}
{{- ('\n' if ns.tool else '<｜tool▁outputs▁begin｜>') + '<｜tool▁output▁begin｜>' + message.content + '<｜tool▁output▁end｜>' }}
{%- set ns.tool = true %}
{%- else %}{{- '<｜tool▁outputs▁end｜>' if ns.tool else '<｜Assistant｜>' }}{%- set ns.tool = false %}
{{- (message.content or '').split('</think>')[-1] }}
{%- for call in message.tool_calls or [] %}{{- '<｜tool▁calls▁begin｜>' if loop.first else '\n' }}
{{- '<｜tool▁call▁begin｜>' + call.type + '<｜tool▁sep｜>' + call.function.name + '\n```json\n' + call.function.arguments + '\n```<｜tool▁call▁end｜>' }}
{{- '<｜tool▁calls▁end｜>' if loop.last }}{%- endfor %}{{- '<｜end▁of▁sentence｜>' }}
{%- endif %}{%- endfor %}{{- '<｜tool▁outputs▁end｜>' if ns.tool }}
{%- if add_generation_prompt and not ns.tool %}{{- '<｜Assistant｜><think>\n' }}{%- endif %}"""
)

# GLM-4.5: a reply is ended by the header of what follows, which is another one for results.
GLM = (
    "[gMASK]<sop>"
    + _TOOLS
    + """\
{%- for message in messages %}{%- if message.role == 'tool' %}
{{- ('' if not loop.first and messages[loop.index0 - 1].role == 'tool' else '<|observation|>') + '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
{%- elif message.role == 'assistant' %}{{- '<|assistant|>' }}
{{- '\n<think>' + (message.reasoning_content or '') + '</think>' }}
{%- if message.content.strip() %}{{- '\n' + message.content.strip() }}{%- endif %}
{%- for call in message.tool_calls or [] %}{{- '\n<tool_call>' + call.function.name }}
{%- for key, value in call.function.arguments.items() %}
{{- '\n<arg_key>' + key + '</arg_key>\n<arg_value>' + (value if value is string else value | tojson) + '</arg_value>' }}
{%- endfor %}{{- '\n</tool_call>' }}{%- endfor %}
{%- else %}{{- '<|' + message.role + '|>\n' + message.content }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"""
)

# Kimi-K2: ids of calls say their function and number.
KIMI = (
    _TOOLS
    + """\
{%- for message in messages %}
{{- '<|im_system|>' + message.role + '<|im_middle|>' if message.role in ('system', 'tool') else '<|im_' + message.role + '|>' + message.role + '<|im_middle|>' }}
{%- if message.role == 'tool' %}{{- '## Return of ' + message.tool_call_id + '\n' }}{%- endif %}{{- message.content }}
{%- for call in message.tool_calls or [] %}{{- '<|tool_calls_section_begin|>' if loop.first }}
{{- '<|tool_call_begin|>' + call.id + '<|tool_call_argument_begin|>' + """
    + _ARGUMENTS
    + """ + '<|tool_call_end|>' }}{{- '<|tool_calls_section_end|>' if loop.last }}{%- endfor %}
{{- '<|im_end|>' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_assistant|>assistant<|im_middle|>' }}{%- endif %}"""
)

# Mistral: ids of nine characters, users and assistants alternate.
MISTRAL = (
    "{{- bos_token }}"
    + """{%- if tools %}{{- '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{%- endif %}
{%- set ns = namespace(n=0) %}{%- for message in messages %}{%- if message.role in ('user', 'assistant') and not message.tool_calls %}
{%- if (message.role == 'user') != (ns.n % 2 == 0) %}{{- raise_exception('roles must alternate') }}{%- endif %}
{%- set ns.n = ns.n + 1 %}{%- endif %}
{%- if message.role == 'tool' %}{%- if message.tool_call_id | length != 9 %}{{- raise_exception('ids') }}{%- endif %}
{{- '[TOOL_RESULTS]{"content": ' + message.content | tojson + ', "call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
{%- elif message.tool_calls %}{{- '[TOOL_CALLS][' }}{%- for call in message.tool_calls %}
{{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' }}{{- ', ' if not loop.last }}{%- endfor %}
{{- ']' + eos_token }}
{%- elif message.role == 'assistant' %}{{- message.content + eos_token }}
{%- elif message.role == 'user' %}{{- '[INST]' + message.content + '[/INST]' }}
{%- else %}{{- raise_exception('role') }}{%- endif %}{%- endfor %}"""
)

# Llama 4: a list of calls in Python.
PYTHONIC = """\
{{- bos_token }}{%- for tool in tools or [] %}{{- tool | tojson }}{%- endfor %}{%- for message in messages %}
{{- '<|start_header_id|>' + ('ipython' if message.role == 'tool' else message.role) + '<|end_header_id|>\n\n' }}
{%- if message.tool_calls %}{{- '[' }}{%- for call in message.tool_calls %}{{- call.function.name + '(' }}
{%- for key, value in call.function.arguments.items() %}
{{- key + '=' + value | tojson }}{{- ', ' if not loop.last }}{%- endfor %}{{- ')' }}{{- ', ' if not loop.last }}
{%- endfor %}{{- ']' }}{%- else %}{{- message.content | trim }}{%- endif %}{{- '<|eot_id|>' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"""

# Magistral: thoughts between [THINK] and [/THINK], which are special tokens.
MAGISTRAL = """{{- bos_token }}{%- for message in messages %}{%- if message.role == 'assistant' %}
{%- if message.reasoning_content %}{{- '[THINK]\n' + message.reasoning_content + '\n[/THINK]\n\n' }}{%- endif %}
{{- message.content + eos_token }}
{%- else %}{{- ('[INST]' if message.role == 'user' else '[' + message.role + ']') + message.content + '[/INST]' }}
{%- endif %}{%- endfor %}"""

# gpt-oss: thoughts and answers are messages of their own, in channels; another token ends the last one.
HARMONY = """{%- for message in messages %}
{%- if message.role == 'assistant' %}{%- if '<|channel|>' in message.content %}{{- raise_exception('channel') }}{%- endif %}
{%- if message.thinking and loop.last %}{{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}{%- endif %}
{{- '<|start|>assistant<|channel|>final<|message|>' + message.content }}
{{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}
{%- else %}{{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"""

FAMILIES = {
    "qwen_xml": QWEN_XML,
    "deepseek": DEEPSEEK,
    "glm": GLM,
    "kimi": KIMI,
    "mistral": MISTRAL,
    "pythonic": PYTHONIC,
    "magistral": MAGISTRAL,
    "harmony": HARMONY,
}
ENDS = {
    "deepseek": "<｜end▁of▁sentence｜>",
    "kimi": "<|im_end|>",
    "pythonic": "<|eot_id|>",
    "harmony": "<|return|>",
}
SPECIAL = [
    "<｜end▁of▁sentence｜>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>",
    "<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "[INST]", "[/INST]", "[TOOL_CALLS]",
    "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "<|python_tag|>",
    "[THINK]", "[/THINK]", "<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|return|>",
]  # fmt: skip
# Not special for DeepSeek's and Kimi's tokenizers either.
ADDED = [
    "<｜User｜>", "<｜Assistant｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", "<｜tool▁outputs▁begin｜>", "<｜tool▁output▁begin｜>",
    "<｜tool▁output▁end｜>", "<｜tool▁outputs▁end｜>", "<|tool_calls_section_begin|>", "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>", "<|tool_call_end|>", "<|tool_calls_section_end|>",
]  # fmt: skip
