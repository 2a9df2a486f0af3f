"""Small chat templates in the style of the published ones, and a tokenizer of a few words."""

from typing import Any

CHATML = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\\n</tools>\\nAnswer with <tool_call>{...}</tool_call><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if message.reasoning_content is string and loop.index0 > ns.last %}
            {{- '<think>\\n' + message.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- message.content }}
        {%- for call in message.tool_calls or [] %}
            {%- if call.function %}{%- set call = call.function %}{%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
            {{- call.arguments if call.arguments is string else call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content }}
        {{- '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

LLAMA3 = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'tool' or 'tool_calls' in message %}
        {%- if message.role == 'tool' %}
            {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}
            {{- message.content + '<|eot_id|>' }}
        {%- else %}
            {%- if message.tool_calls | length != 1 %}
                {{- raise_exception("This model only supports single tool-calls at once!") }}
            {%- endif %}
            {%- set call = message.tool_calls[0].function %}
            {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
            {{- '{"name": "' + call.name + '", "parameters": ' + (call.arguments | tojson) + '}' }}
            {{- '<|eot_id|>' }}
        {%- endif %}
    {%- else %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
        {{- message.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

MISTRAL = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- if loop.last and tools %}{{- '[AVAILABLE_TOOLS]' + (tools | tojson) }}{%- endif %}
        {{- '[INST] ' + message.content + '[/INST]' }}
    {%- elif message.tool_calls %}
        {{- '[TOOL_CALLS][' }}
        {%- for call in message.tool_calls %}
            {{- call.function | tojson }}
            {%- if call.id | length != 9 %}
                {{- raise_exception("Tool call IDs should have length 9!") }}
            {%- endif %}
            {{- ', ' if not loop.last }}
        {%- endfor %}
        {{- ']' + eos_token }}
    {%- elif message.role == 'assistant' %}
        {{- ' ' + message.content + eos_token }}
    {%- elif message.role == 'tool' %}
        {{- '[TOOL_RESULTS]' + message.content + '[/TOOL_RESULTS]' }}
    {%- else %}
        {{- raise_exception("Only user and assistant roles are supported!") }}
    {%- endif %}
{%- endfor %}
"""

# It puts arguments together with strings, so they have to be one; and opens the reasoning.
DEEPSEEK = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'system' %}{{- message.content }}{%- endif %}
    {%- if message.role == 'user' %}{{- '<｜User｜>' + message.content }}{%- endif %}
    {%- if message.role == 'assistant' and message.tool_calls %}
        {{- '<｜Assistant｜><｜tool▁calls▁begin｜>' }}
        {%- for call in message.tool_calls %}
            {{- '<｜tool▁call▁begin｜>' + call.type + '<｜tool▁sep｜>' + call.function.name }}
            {{- '\\n```json\\n' + call.function.arguments + '\\n```<｜tool▁call▁end｜>' }}
        {%- endfor %}
        {{- '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}
    {%- elif message.role == 'assistant' %}
        {%- set content = message.content %}
        {%- if '</think>' in content %}
            {%- set content = content.split('</think>')[-1] %}
        {%- endif %}
        {{- '<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>' }}
    {%- endif %}
    {%- if message.role == 'tool' %}{{- '<｜tool▁output▁begin｜>' + message.content }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<｜Assistant｜><think>\\n' }}{%- endif %}
"""

# Its reasoning and its answers are messages of their own, and there is one call in a message.
GPT_OSS = """\
{{- '<|start|>system<|message|>Reasoning: ' + (reasoning_effort or 'medium') + '<|end|>' }}
{%- for message in messages %}
    {%- if message.role == 'assistant' and message.tool_calls %}
        {%- if message.content and message.thinking %}
            {{- raise_exception("Cannot pass both content and thinking with tool calls!") }}
        {%- elif message.content or message.thinking %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' }}
            {{- (message.content or message.thinking) + '<|end|>' }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json' }}
        {{- '<|message|>' + (call.arguments | tojson) + '<|call|>' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}
    {%- elif message.role == 'tool' %}
        {{- '<|start|>functions.' + message.name + ' to=assistant<|channel|>commentary' }}
        {{- '<|message|>' + (message.content | tojson) + '<|end|>' }}
    {%- else %}
        {{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}
"""

# Literals with marks for quotes, in alphabetical order.
GEMMA4 = """\
{%- macro literal(value) -%}
    {%- if value is string -%}{{- '<|"|>' + value + '<|"|>' -}}
    {%- elif value is boolean -%}{{- 'true' if value else 'false' -}}
    {%- elif value is mapping -%}
        {{- '{' -}}
        {%- for key, each in value | dictsort -%}
            {{- ',' if not loop.first -}}{{- key -}}:{{- literal(each) -}}
        {%- endfor -%}
        {{- '}' -}}
    {%- elif value is sequence -%}
        {{- '[' -}}
        {%- for each in value -%}{{- ',' if not loop.first -}}{{- literal(each) -}}{%- endfor -%}
        {{- ']' -}}
    {%- else -%}{{- value -}}
    {%- endif -%}
{%- endmacro -%}
{{- bos_token -}}
{%- for message in messages -%}
    {{- '<|turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' -}}
    {%- for call in message.tool_calls or [] -%}
        {{- '<|tool_call>call:' + call.function.name + literal(call.function.arguments) -}}
        {{- '<tool_call|>' -}}
    {%- endfor -%}
    {{- message.content | trim + '<turn|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|turn>model\\n' -}}{%- endif -%}
"""

# Calls in Python's notation, of which JSON's words are part.
OLMO3 = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content }}
    {%- for call in message.tool_calls or [] %}
        {{- '<function_calls>\\n' if loop.first }}{{- call.function.name + '(' }}
        {%- for key, value in call.function.arguments.items() %}
            {{- key + '=' + (value | tojson) + (', ' if not loop.last else '') }}
        {%- endfor %}
        {{- ')' + ('\\n</function_calls>' if loop.last else '\\n') }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

# It reads content as a list of parts only.
PARTS = """\
{%- for message in messages %}
    {{- message.role + ':' }}
    {%- for part in message.content %}
        {%- if part.type == 'text' %}{{- part.text }}{%- endif %}
    {%- endfor %}
    {{- '\\n' }}
{%- endfor %}
"""

FAMILIES = {
    "chatml": CHATML,
    "llama3": LLAMA3,
    "mistral": MISTRAL,
    "deepseek": DEEPSEEK,
    "gpt_oss": GPT_OSS,
    "gemma4": GEMMA4,
    "olmo3": OLMO3,
}


def tokenizer(template: Any = None, special: tuple[str, ...] = ()) -> Any:
    """Words of a letter each, with a beginning of sequence that it adds by itself."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocabulary |= {chr(code): code - 29 for code in range(32, 127)}
    fast = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    fast.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    fast.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    made = PreTrainedTokenizerFast(
        tokenizer_object=fast, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    if special:
        made.add_special_tokens({"additional_special_tokens": list(special)})
    made.chat_template = template
    return made
